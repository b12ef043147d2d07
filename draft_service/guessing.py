"""From a drafter's logits to guesses, in both modes: drawn ones go with what they were drawn from. It does not know what made the logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.confidence import confidence
from draft_service.proposer import Guess
from shared.drawing import invert, pad, to_wire
from shared.noise import key_tensor, uniforms
from shared.picking import finite_rows, pick_usable, process
from shared.sampling import Pick


def guess(logits: Tensor, picks: Sequence[Pick], is_drawn: Sequence[bool], min_confidence: float = 0.0) -> list[Guess | None]:
    """One guess per row, None where what the request's rules make of the logits is not finite.

    Args:
        logits: [R, draft vocabulary], which may be narrower or wider than the target's.
        picks: one per row.
        is_drawn: per row, whether the guess is a draw of its own (rejection mode), or what noise and logits say.
        min_confidence: a guess that is not drawn is doubted below it (`draft_service.confidence`); 0 doubts none, and costs nothing.
    """
    if not picks:
        return []
    scores = process(logits, picks)
    drawn = [row for row, is_draw in enumerate(is_drawn) if is_draw]
    if not drawn:
        return _pick(scores, picks, min_confidence)
    if len(drawn) == len(picks):
        return _draw(scores, picks)
    picked = [row for row, is_draw in enumerate(is_drawn) if not is_draw]
    guesses: list[Guess | None] = [None] * len(picks)
    for rows, made in (
        (picked, _pick(scores[picked], [picks[row] for row in picked], min_confidence)),
        (drawn, _draw(scores[drawn], [picks[row] for row in drawn])),
    ):
        for row, each in zip(rows, made, strict=True):
            guesses[row] = each
    return guesses


def _pick(scores: Tensor, picks: Sequence[Pick], min_confidence: float) -> list[Guess | None]:
    """The best token of every row with the noise of its pick; None where the scores are not finite."""
    # Everything crosses from the device at once: each crossing waits for all that was started before it.
    columns = [pick_usable(scores, picks)]
    if min_confidence > 0.0:
        columns.append(confidence(scores, picks, columns[0]) < min_confidence)
        ids, doubted = torch.stack(columns).tolist()
        return [Guess(token_id, is_doubted=bool(is_doubted)) if token_id >= 0 else None for token_id, is_doubted in zip(ids, doubted, strict=True)]
    return [Guess(token_id) if token_id >= 0 else None for token_id in columns[0].tolist()]


def _draw(scores: Tensor, picks: Sequence[Pick]) -> list[Guess | None]:
    """A draw from every row, with what it was drawn from; None where the scores are not finite."""
    guesses: list[Guess | None] = [None] * len(picks)
    usable = finite_rows(scores).nonzero()[:, 0].tolist()
    if not usable:
        return guesses
    # Rounded to its wire form first, then drawn from: the ratio test needs the distribution that was really sampled.
    distributions = to_wire(scores if len(usable) == len(picks) else scores[usable])
    _, weights = pad(distributions)
    drawn = [picks[row] for row in usable]
    places = invert(weights, uniforms(key_tensor(pick.key for pick in drawn), torch.tensor([pick.position for pick in drawn])))
    for row, distribution, place in zip(usable, distributions, places.tolist(), strict=True):
        guesses[row] = Guess(distribution.token_ids[place], distribution)
    return guesses
