"""What makes guesses, seen from the drafter. It does not know the link."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.errors import OutriderError
from shared.link import Distribution
from shared.sampling import Mode


class CannotServe(OutriderError):
    """A proposer gives up a sequence, for good.

    Args:
        number: which sequence; not necessarily one that was asked about.
        message: why, in a few words; the verifier is told.
    """

    reason = "CANNOT_SERVE"

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.message = message


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may follow.

    Args:
        token_id: which.
        distribution: what it was really drawn from; None: it is a function of the text before it.
        is_doubted: it is so unlikely to be right that none should be made after it; only the last of a sequence's guesses may be.
        maker: kind of the proposer that made it, where several take turns; empty: the only one.
    """

    token_id: int
    distribution: Distribution | None = None
    is_doubted: bool = False
    maker: str = ""


class Proposer(Protocol):
    """Makes guesses for many sequences at once. Called from one thread."""

    @property
    def name(self) -> str:
        """What it is called in metrics and `GetInfo`: `ngram`, or the draft model's name."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of proposers that make its guesses, for metrics: `ngram`, `model`, `speculator` or `stand-in`; one, unless several take turns."""
        ...

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Verification modes whose rules its guesses obey."""
        ...

    @property
    def stats(self) -> ProposerStats:
        """What it has taken so far."""
        ...

    def open(self, sequence: DraftSequence) -> None:
        """Gets to know a sequence. The object lives and changes until `close`.

        Raises:
            CannotServe: this sequence never can be served; it is not open then.
        """
        ...

    def close(self, sequence: DraftSequence) -> None:
        """Forgets an open sequence and frees all that it held."""
        ...

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> Sequence[Sequence[Guess] | None]:
        """Guesses what follows committed + tail, for all sequences together.

        Args:
            requests: open sequences, each with the most guesses that are wanted, at least 1.

        Returns:
            For each request the next guesses, in order. None: still catching up, ask again. Empty: nothing until the next commit.

        Raises:
            CannotServe: one sequence had to be given up before anything was guessed; the rest may be asked again once it is closed.
        """
        ...
