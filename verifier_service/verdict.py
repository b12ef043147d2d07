"""What verification says about one sequence, whatever the rule was. It does not know tensors."""

from dataclasses import dataclass

from shared.link import HiddenState


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's tokens after a committed text.

    Args:
        accepted: how many of the scored guesses are the target's own choice.
        token_ids: emitted tokens: the accepted guesses, then the next token; empty where a sequence had no row.
        hidden: what the target's head read in the row that the last of them comes from, if anybody wants it.
    """

    accepted: int
    token_ids: tuple[int, ...]
    hidden: HiddenState | None = None
