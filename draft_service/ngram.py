"""Prompt lookup: what followed the last few tokens the last time they occurred. No model, no tokenizer; ids are opaque.

The longest match counts, and among those the most recent (Saxena 2023, "Prompt Lookup Decoding"). Matches end in committed text;
the tokens to be matched may reach into the tail. A guess is a function of the text, hence certain, in either mode.
"""

from collections.abc import Sequence
from itertools import islice

from draft_service.proposer import Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.sampling import Mode


def look_up(committed: Sequence[int], tail: Sequence[int], min_n: int, max_n: int, room: int) -> list[int]:
    """The rule, by plain search; `NgramIndex` gives the same answers from a table.

    Args:
        committed: where matches are looked for.
        tail: guesses after it; the text to be continued is committed + tail.
        min_n: fewest tokens that make a match, at least 1.
        max_n: most tokens that are compared.
        room: most tokens wanted.

    Returns:
        At most `room` committed tokens that followed the match, fewer where the committed text ends; empty without a match.
    """
    text = [*committed, *tail]
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        for end in range(len(committed) - 1, n - 1, -1):
            if list(committed[end - n : end]) == text[-n:]:
                return list(committed[end : end + room])
    return []


class NgramIndex:
    """Where each n-gram of a growing text was last followed by something.

    Args:
        min_n: fewest tokens of an n-gram, at least 1.
        max_n: most tokens of an n-gram.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._max_n = max_n
        self._num_indexed = 0
        # Per n: n-gram to the position of the token that followed its latest occurrence. Longest n first.
        self._followers: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_n, min_n - 1, -1)}

    def grow(self, committed: Sequence[int]) -> None:
        """Takes the tokens that are new since the last call; cost is theirs alone."""
        for n, followers in self._followers.items():
            # n-grams that end before a token that is new, paired with its position; later ones overwrite earlier ones.
            first = max(n, self._num_indexed)
            recent = committed[first - n :]
            grams = zip(*(islice(recent, offset, None) for offset in range(n)), strict=False)
            followers.update(zip(grams, range(first, len(committed)), strict=False))
        self._num_indexed = len(committed)

    def look_up(self, committed: Sequence[int], tail: Sequence[int], room: int) -> list[int]:
        """As the function `look_up`, for the text that `grow` has seen, in time that does not depend on its length."""
        recent = tuple(committed[-self._max_n :]) + tuple(tail[-self._max_n :])
        for n, followers in self._followers.items():
            position = followers.get(recent[-n:]) if len(recent) >= n else None
            if position is not None:
                return list(committed[position : position + room])
        return []


class NgramProposer:
    """Proposes by prompt lookup.

    Args:
        min_n: shortest match, at least 1.
        max_n: longest match, at least `min_n`.

    Raises:
        ValueError: the lengths are out of range.
    """

    name = "ngram"
    kinds = ("ngram",)
    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram lengths must satisfy 1 <= min_n <= max_n, not {min_n} and {max_n}")
        self.stats = ProposerStats()
        self._min_n, self._max_n = min_n, max_n
        self._indexes: dict[int, NgramIndex] = {}

    def open(self, sequence: DraftSequence) -> None:
        """Starts an empty index; the first lookup fills it."""
        self._indexes[sequence.number] = NgramIndex(self._min_n, self._max_n)

    def close(self, sequence: DraftSequence) -> None:
        """Drops the index."""
        del self._indexes[sequence.number]

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess]]:
        """As many tokens per sequence as the match offers and the room takes."""
        return [[Guess(token_id) for token_id in self._continue(sequence, room)] for sequence, room in requests]

    def _continue(self, sequence: DraftSequence, room: int) -> list[int]:
        index = self._indexes[sequence.number]
        index.grow(sequence.committed)
        return index.look_up(sequence.committed, sequence.tail, room)
