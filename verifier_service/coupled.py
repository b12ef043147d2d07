"""Verification by equality: a guess is accepted if and only if it is the token that the target picks. It does not know how tokens are picked."""

from collections.abc import Sequence

from torch import Tensor

from verifier_service.expansion import ABSENT_ID
from verifier_service.verdict import Verdict


def verify_coupled(target_ids: Tensor, guesses: Sequence[Sequence[int]]) -> list[Verdict]:
    """Keeps of each sequence's guesses what plain decoding would have said (Daliri, Musco, Suresh 2024; greedy is the same without noise).

    Args:
        target_ids: [B, K_max + 1] int64 as contracted: the target's pick in each row, -1 where a sequence has no row, or none to pick from.
        guesses: per sequence, its scored guesses; any integers.

    Returns:
        One verdict per sequence; it holds no -1 and is empty where the sequence has no first row. A guess whose own row cannot be picked
        from is as if it had not come.
    """
    return [_match(row, scored) for row, scored in zip(target_ids.tolist(), guesses, strict=True)]


def _match(picked: Sequence[int], guesses: Sequence[int]) -> Verdict:
    if picked[0] == ABSENT_ID:
        return Verdict(0, ())
    accepted = 0
    while accepted < len(guesses) and guesses[accepted] == picked[accepted] and picked[accepted + 1] != ABSENT_ID:
        accepted += 1
    return Verdict(accepted, tuple(picked[: accepted + 1]))
