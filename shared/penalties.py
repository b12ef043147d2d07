"""Penalties on what the text already holds. It does not know which of the tokens are guesses: every row brings its own history."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shared.sampling import Pick


def penalise(scores: Tensor, picks: Sequence[Pick]) -> None:
    """Applies the repetition penalty (Keskar et al. 2019, over prompt and output), then presence and frequency (over the output), in place.

    Args:
        scores: [R, V]; rows without penalties are not touched.
        picks: one per row.
    """
    rows = [row for row, pick in enumerate(picks) if pick.rules.sampling.has_penalties]
    if not rows:
        return
    chosen = [picks[row] for row in rows]
    # Rows of one sequence share its committed tokens: they are made a tensor once.
    committed = {id(pick.committed): _ids(pick.committed, scores) for pick in chosen}
    histories = [torch.cat([committed[id(pick.committed)], _ids(pick.guesses, scores)]) for pick in chosen]
    outputs = [history[pick.rules.prompt_length :] for history, pick in zip(histories, chosen, strict=True)]
    num_ids = scores.shape[-1]
    index, seen = _flatten(histories, num_ids)
    output_index, written = _flatten(outputs, num_ids)
    counts = torch.bincount(output_index * num_ids + written, minlength=len(rows) * num_ids).view(len(rows), num_ids)

    def per_token(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=scores.dtype, device=scores.device)[index]

    repetition = per_token(pick.rules.sampling.repetition_penalty for pick in chosen)
    presence = per_token(pick.rules.sampling.presence_penalty for pick in chosen)
    frequency = per_token(pick.rules.sampling.frequency_penalty for pick in chosen)
    count = counts[index, seen]
    places = torch.tensor(rows, device=scores.device)[index], seen
    before = scores[places]
    # A positive score is made worse by dividing, a negative one by multiplying.
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    # A token that occurs several times is written several times, with the same value.
    scores[places] = repeated - presence * (count > 0) - frequency * count


def _ids(token_ids: Sequence[int], scores: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=scores.device)


def _flatten(rows: Sequence[Tensor], num_ids: int) -> tuple[Tensor, Tensor]:
    """Ids of all rows in one tensor, and the row of each."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    ids = torch.cat(list(rows))
    index = torch.arange(len(rows), device=ids.device).repeat_interleave(lengths)
    # An id beyond the logits, from a wider vocabulary or a hostile drafter, has no score to change.
    is_scored = (ids >= 0) & (ids < num_ids)
    return index[is_scored], ids[is_scored]
