"""What verification says about one sequence, whatever the rule was. It does not know tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's tokens after a committed text.

    Args:
        accepted: how many of the scored guesses are the target's own choice.
        token_ids: emitted tokens: the accepted guesses, then the next token; empty where a sequence had no row.
    """

    accepted: int
    token_ids: tuple[int, ...]
