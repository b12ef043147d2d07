"""What stands in for two models when only the serving around them is to be measured: how long each takes, and which guesses are right.

Pure values, known to both services from one line of settings. The next token is a function of the last token and its position; whether a
guess is right is a coin keyed by the sequence and the position. So neither depends on how many guesses a step scores, on what the guesses
were made for, or on when they came. Nothing here sleeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shared.digest import splitmix64

FIRST_BYTE_ID = 2
"""Ids below stand for the beginning and the end of a text, the others for bytes; the stand-in says lower-case letters only."""
VOCAB_SIZE = FIRST_BYTE_ID + 256
_FIRST_LETTER_ID = FIRST_BYTE_ID + ord("a")
_NUM_LETTERS = 26

_WRAP_64 = 1 << 64
_GOLDEN_64 = 0x9E3779B97F4A7C15
_COIN = 0x51A9_C0DE


@dataclass(frozen=True, slots=True)
class Simulation:
    """Two models as figures.

    Args:
        target_ms: a forward pass of the target.
        row_ms: what each token in it adds.
        draft_ms: a forward pass of the draft, which gives every sequence one guess.
        draft_seq_ms: what each sequence in it adds.
        lowest_acceptance: chance that a guess is right, in the sequence where it is lowest.
        highest_acceptance: the same where it is highest; sequences with consecutive seeds are spread evenly between the two.
    """

    target_ms: float = 30.0
    row_ms: float = 0.0
    draft_ms: float = 2.0
    draft_seq_ms: float = 0.0
    lowest_acceptance: float = 0.8
    highest_acceptance: float = 0.8

    def target_s(self, num_tokens: int) -> float:
        """Seconds of a forward pass of the target over so many tokens, prompts and guesses included."""
        return (self.target_ms + self.row_ms * num_tokens) / 1e3

    def draft_s(self, num_sequences: int) -> float:
        """Seconds of a forward pass of the draft for so many sequences."""
        return (self.draft_ms + self.draft_seq_ms * num_sequences) / 1e3

    def acceptance(self, seed: int) -> float:
        """A sequence's chance that a guess is right.

        Args:
            seed: uint64 of the sequence, its draft seed.
        """
        # Multiples of the golden ratio fill the unit interval evenly, however many are taken (Weyl).
        return self.lowest_acceptance + (self.highest_acceptance - self.lowest_acceptance) * (seed * _GOLDEN_64 % _WRAP_64) / _WRAP_64

    def is_right(self, seed: int, position: int) -> bool:
        """Whether the guess at a position of a sequence is what the target says there: an independent coin for each."""
        return splitmix64(splitmix64(seed ^ _COIN) ^ position) < self.acceptance(seed) * _WRAP_64


def next_id(token_id: int, position: int) -> int:
    """What the stand-in of the target says at `position`, after `token_id`."""
    return _FIRST_LETTER_ID + splitmix64(token_id << 32 | position) % _NUM_LETTERS


def wrong_id(token_id: int, position: int) -> int:
    """What it does not say there."""
    return _FIRST_LETTER_ID + (next_id(token_id, position) - _FIRST_LETTER_ID + 1) % _NUM_LETTERS


_MAX_MS = 60_000.0
_NUMBERS = {field.name.replace("_", "-"): field.name for field in fields(Simulation) if field.name.endswith("_ms")}


def parse(text: str) -> Simulation:
    """Reads `target-ms=30,row-ms=0.1,draft-ms=2,draft-seq-ms=0.02,acceptance=0.8` or `acceptance=0.5:0.9`; what is left out has its default.

    Raises:
        ValueError: a part is unknown, twice there, or out of range; the text says which.
    """
    figures: dict[str, float] = {}
    for name, value in split(text).items():
        if name == "acceptance":
            lowest, colon, highest = value.partition(":")
            figures["lowest_acceptance"] = _number(name, lowest, 1.0)
            figures["highest_acceptance"] = _number(name, highest, 1.0) if colon else figures["lowest_acceptance"]
            if figures["highest_acceptance"] < figures["lowest_acceptance"]:
                raise ValueError(f"acceptance={value}: the lower one comes first")
        elif name in _NUMBERS:
            figures[_NUMBERS[name]] = _number(name, value, _MAX_MS)
        else:
            raise ValueError(f"there is no {name!r} in a simulation, only {', '.join(_NUMBERS)} and acceptance")
    return Simulation(**figures)


def split(text: str) -> Mapping[str, str]:
    """`NAME=VALUE,...` by name.

    Raises:
        ValueError: it has another form, or a name twice.
    """
    values: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or name in values:
            raise ValueError(f"{part.strip()!r} is {'twice there' if equals else 'not NAME=VALUE'}")
        values[name] = value
    return values


def _number(name: str, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}; it is {text!r}")
    return number
