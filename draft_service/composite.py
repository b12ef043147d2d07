"""Several proposers as one: guesses are looked up where the text has said the same before, and else made by a model. It makes none itself."""

from collections.abc import Sequence
from dataclasses import replace

from draft_service.proposer import Guess, Proposer
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.sampling import Mode

_Answer = Sequence[Guess] | None


class CompositeProposer:
    """Asks the first for coupled sequences, and the second for those that it has nothing for.

    Coupled text does not depend on who guesses. In rejection mode the choice would depend on tokens that were drawn, and bias what follows:
    there the second guesses everything, whatever the text.

    Args:
        first: quick, and often without an answer; it serves every sequence.
        second: has the last word on what can be served.
    """

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self._first = first
        self._second = second
        self.modes = second.modes
        self.kinds = first.kinds + second.kinds

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self._first.name}+{self._second.name}"

    @property
    def stats(self) -> ProposerStats:
        """Those of the second: the first has no model."""
        return self._second.stats

    def open(self, sequence: DraftSequence) -> None:
        """Both get to know it, or neither.

        Raises:
            CannotServe: the second cannot serve it.
        """
        self._second.open(sequence)
        self._first.open(sequence)

    def close(self, sequence: DraftSequence) -> None:
        """Both forget it."""
        self._first.close(sequence)
        self._second.close(sequence)

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[_Answer]:
        """What the first has, and what the second makes of the rest.

        Raises:
            CannotServe: as the second's.
        """
        answers: list[_Answer] = [None] * len(requests)
        coupled = [index for index, (sequence, _) in enumerate(requests) if sequence.mode is Mode.COUPLED]
        self._ask(self._first, requests, coupled, answers)
        self._ask(self._second, requests, [index for index, guesses in enumerate(answers) if not guesses], answers)
        return answers

    def _ask(self, proposer: Proposer, requests: Sequence[tuple[DraftSequence, int]], indices: Sequence[int], answers: list[_Answer]) -> None:
        """Puts the answers of one of them into their places, its name on every guess."""
        if not indices:
            return
        for index, guesses in zip(indices, proposer.propose([requests[index] for index in indices]), strict=True):
            answers[index] = guesses and [replace(guess, maker=proposer.kinds[0]) for guess in guesses]
