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
    # Rows of one sequence share its committed tokens: they are counted once.
    keys = [(id(pick.committed), pick.rules.prompt_length) for pick in chosen]
    committed = {key: _count(pick, scores) for key, pick in zip(keys, chosen, strict=True)}
    (index, seen), count = _merge([committed[key] for key in keys], [_guessed(pick, scores) for pick in chosen], scores.shape[-1])

    def per_token(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=scores.dtype, device=scores.device)[index]

    repetition = per_token(pick.rules.sampling.repetition_penalty for pick in chosen)
    presence = per_token(pick.rules.sampling.presence_penalty for pick in chosen)
    frequency = per_token(pick.rules.sampling.frequency_penalty for pick in chosen)
    places = torch.tensor(rows, device=scores.device)[index], seen
    before = scores[places]
    # A positive score is made worse by dividing, a negative one by multiplying.
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    scores[places] = repeated - presence * (count > 0) - frequency * count


def _count(pick: Pick, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The ids among the committed tokens, and how often each stands in the output: both [N]."""
    ids, places = torch.unique(_ids(pick.committed, scores), return_inverse=True)
    return ids, places[pick.rules.prompt_length :].bincount(minlength=len(ids))


def _guessed(pick: Pick, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the guesses behind them, in which an id may occur twice."""
    ids = _ids(pick.guesses, scores)
    return ids, (torch.arange(len(ids), device=ids.device) + len(pick.committed) >= pick.rules.prompt_length).long()


def _merge(
    committed: Sequence[tuple[Tensor, Tensor]], guessed: Sequence[tuple[Tensor, Tensor]], num_ids: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Every (row, id) that occurs, once, and its count in the row's output. Its size is that of the histories, not of the vocabulary.

    Args:
        committed: per row from `_count`.
        guessed: per row from `_guessed`.
        num_ids: ids beyond it, from a wider vocabulary or a hostile drafter, have no score to change.
    """
    parts = [part for row in zip(committed, guessed, strict=True) for part in row]
    ids, counts = torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])
    lengths = torch.tensor([len(known) + len(new) for (known, _), (new, _) in zip(committed, guessed, strict=True)], device=ids.device)
    index = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
    is_scored = (ids >= 0) & (ids < num_ids)
    pairs, places = torch.unique(index[is_scored] * num_ids + ids[is_scored], return_inverse=True)
    total = torch.zeros_like(pairs).scatter_add_(0, places, counts[is_scored])
    return (pairs // num_ids, pairs % num_ids), total


def _ids(token_ids: Sequence[int], scores: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=scores.device)
