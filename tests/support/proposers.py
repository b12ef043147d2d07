"""Proposers for tests whose guesses are plain functions of the text: no model, no KV. They do not know the drafter."""

from collections.abc import Callable, Sequence

from draft_service.proposer import CannotServe, Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.digest import extend
from shared.link import Distribution
from shared.sampling import Mode

Rule = Callable[[list[int], int], "list[int] | None"]


class RuleProposer:
    """Answers by a rule from (committed + tail, room) to guesses; keeps a record of what is open and of who was asked together.

    Args:
        rule: what to answer.
        limit: most open sequences; the youngest is given up when another one is asked about beyond it.
    """

    name = "rule"
    kinds = ("rule",)

    def __init__(self, rule: Rule, limit: int = 1_000_000, modes: tuple[Mode, ...] = (Mode.COUPLED, Mode.REJECTION)) -> None:
        self.stats = ProposerStats()
        self.modes = modes
        self.opened: list[int] = []
        self.asked: list[list[int]] = []
        self._rule = rule
        self._limit = limit

    def open(self, sequence: DraftSequence) -> None:
        if max(sequence.committed) >= 1_000:
            raise CannotServe(sequence.number, "no such token")
        self.opened.append(sequence.number)

    def close(self, sequence: DraftSequence) -> None:
        self.opened.remove(sequence.number)

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess] | None]:
        if len(self.opened) > self._limit:
            raise CannotServe(self.opened[-1], "no room")
        self.asked.append([sequence.number for sequence, _ in requests])
        return [self._answer(sequence, room) for sequence, room in requests]

    def _answer(self, sequence: DraftSequence, room: int) -> list[Guess] | None:
        token_ids = self._rule(sequence.committed + sequence.tail, room)
        if token_ids is None:
            return None
        if sequence.mode is Mode.COUPLED:
            return [Guess(token_id) for token_id in token_ids]
        return [Guess(token_id, Distribution((token_id, token_id + 1), (0.5, 0.5))) for token_id in token_ids]


def count_up(text: list[int], room: int) -> list[int]:
    """The next integer, one at a time."""
    return [text[-1] + 1]


def moody(text: list[int], room: int) -> list[int] | None:
    """None, nothing, or one to four of three tokens: a function of the text that looks random."""
    digest = extend(0, text)
    size = digest % 7
    if size == 6:
        return None if digest // 7 % 2 else []
    return [(digest >> shift) % 3 for shift in range(8, 8 + min(size, room))]
