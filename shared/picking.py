"""From logits to tokens: one pure path for both services, so that a drafter with the target's noise foresees sampled tokens too.

It does not know which model the logits come from, nor whether a row follows committed tokens or guesses.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared.noise import GUMBEL_MAX, gumbel, key_tensor
from shared.penalties import penalise
from shared.sampling import Pick
from shared.truncation import truncate

_EXCLUDED = float("-inf")
# Beyond any rounding error of a score: what the bound excludes cannot win even so.
_SLACK = 0.01
# Noise is made in tiles that stay in a core's cache, and for single tokens where few can win.
_TILE_ELEMENTS = 32_768
_DENSE_ABOVE = 0.1


def process(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Turns logits into scores whose softmax is the distribution to pick from.

    In this order: penalties, logit bias, masks, temperature, top-k, top-p, min-p. Every row counts its own hypothetical history. Rows do
    not influence each other. Greedy rows keep their scale and are not truncated: their best token is the same.

    Args:
        logits: [R, V], not changed. Rows that `finite_rows` rejects give scores without meaning, and harm no other row.
        picks: one per row.

    Returns:
        [R, V] float32 or wider; -inf where a token is excluded. Suppression that would leave a row no token at all is lifted.
    """
    scores = torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device).copy_(logits)
    penalise(scores, picks)
    _add_bias(scores, picks)
    _mask(scores, picks)
    _heat(scores, picks)
    rows = [row for row, pick in enumerate(picks) if pick.rules.sampling.truncates and not pick.rules.sampling.is_greedy]
    if rows:
        samplings = [picks[row].rules.sampling for row in rows]
        scores[rows] = truncate(scores[rows], [s.top_k for s in samplings], [s.top_p for s in samplings], [s.min_p for s in samplings])
    return scores


def pick_tokens(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Picks each row's token. Coupled verification and plain decoding are both this call.

    Args:
        logits: [R, V]
        picks: one per row.

    Returns:
        [R] int64 in 0..V-1; without meaning for a row whose scores `finite_rows` rejects.
    """
    return pick_best(process(logits, picks), picks)


def pick_best(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Argmax of score + noise(key, position, token), without noise where greedy; ties go to the lowest id.

    Adding Gumbel noise and taking the best is a draw from the softmax (Gumbel 1954).

    Args:
        scores: [R, V] from `process`.
        picks: one per row.

    Returns:
        As `pick_tokens`.
    """
    # torch.max, unlike most of torch, promises the first of equal maxima: the lowest id.
    best_ids = scores.max(-1).indices
    rows = [row for row, pick in enumerate(picks) if not pick.rules.sampling.is_greedy]
    if rows:
        keys = key_tensor((picks[row].key for row in rows), scores.device)
        positions = torch.tensor([picks[row].position for row in rows], device=scores.device)
        everything = len(rows) == len(picks)
        best_ids[rows] = _best_with_noise(scores if everything else scores[rows], best_ids[rows], keys, positions)
    return best_ids


def probabilities(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Distributions that `pick_tokens` picks from.

    Args:
        scores: [R, V] from `process`.
        picks: one per row.

    Returns:
        [R, V] float64; greedy rows are certain of their best token.
    """
    distributions = scores.softmax(-1, dtype=torch.float64)
    rows = [row for row, pick in enumerate(picks) if pick.rules.sampling.is_greedy]
    if rows:
        best_ids = scores[rows].max(-1).indices
        distributions[rows] = torch.nn.functional.one_hot(best_ids, scores.shape[-1]).to(torch.float64)
    return distributions


def finite_rows(rows: Tensor) -> Tensor:
    """Which rows, of logits or of scores, can be picked from: no NaN, no +inf, not all -inf. [R, V] to [R] bool."""
    return rows.amax(-1).isfinite()


def _add_bias(scores: Tensor, picks: Sequence[Pick]) -> None:
    num_ids = scores.shape[-1]
    addends = [(row, token_id, addend) for row, pick in enumerate(picks) for token_id, addend in pick.rules.sampling.logit_bias if token_id < num_ids]
    if addends:
        rows, ids, values = zip(*addends, strict=True)
        # An id given twice counts twice, in the order given.
        scores.index_put_(_index(rows, ids, scores), torch.tensor(values, dtype=scores.dtype, device=scores.device), accumulate=True)


def _mask(scores: Tensor, picks: Sequence[Pick]) -> None:
    num_ids = scores.shape[-1]
    for size in {pick.rules.vocab_size for pick in picks}:
        if size < num_ids:
            scores[[row for row, pick in enumerate(picks) if pick.rules.vocab_size == size], size:] = _EXCLUDED
    suppressed = [(row, token_id) for row, pick in enumerate(picks) for token_id in _suppressed_ids(pick) if token_id < num_ids]
    if not suppressed:
        return
    rows, ids = zip(*suppressed, strict=True)
    index = _index(rows, ids, scores)
    kept = scores[index]
    scores[index] = _EXCLUDED
    # A row that has nothing else to say may say it: the alternative is no distribution at all.
    is_empty = scores.amax(-1)[index[0]] == _EXCLUDED
    scores[index] = torch.where(is_empty, kept, scores[index])


def _suppressed_ids(pick: Pick) -> tuple[int, ...]:
    return pick.rules.suppressed_ids if pick.position < pick.rules.suppressed_until else ()


def _heat(scores: Tensor, picks: Sequence[Pick]) -> None:
    temperatures = [1.0 if pick.rules.sampling.is_greedy else pick.rules.sampling.temperature for pick in picks]
    if any(temperature != 1.0 for temperature in temperatures):
        scores.div_(torch.tensor(temperatures, dtype=scores.dtype, device=scores.device)[:, None])


def _best_with_noise(scores: Tensor, leaders: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Noisy argmax. [R, V], and per row the best score's id, the key and the position, to [R] ids."""
    # Noise is bounded: a token that cannot catch up with the leader's noisy score needs none of its own.
    reached = scores.gather(1, leaders[:, None])[:, 0] + gumbel(keys, positions, leaders)
    can_win = scores >= (reached - (GUMBEL_MAX + _SLACK))[:, None]
    is_dense = can_win.sum(-1) > _DENSE_ABOVE * scores.shape[-1]
    winners = leaders.clone()
    dense_rows = is_dense.nonzero()[:, 0]
    if len(dense_rows):
        winners[dense_rows] = _search_all(scores[dense_rows], leaders[dense_rows], keys[dense_rows], positions[dense_rows])
    rows, ids = (can_win & ~is_dense[:, None]).nonzero(as_tuple=True)
    if len(rows):
        totals = scores[rows, ids] + gumbel(keys[rows], positions[rows], ids)
        best = torch.full_like(reached, _EXCLUDED).scatter_reduce_(0, rows, totals, "amax")
        is_best = totals == best[rows]
        winners.scatter_reduce_(0, rows[is_best], ids[is_best], "amin", include_self=False)
    return winners


def _search_all(scores: Tensor, leaders: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    winners = leaders.clone()
    best = torch.full(leaders.shape, _EXCLUDED, dtype=torch.float64, device=scores.device)
    for start, end in _tiles(*scores.shape):
        ids = torch.arange(start, end, device=scores.device)
        top = gumbel(keys[:, None], positions[:, None], ids).add_(scores[:, start:end]).max(-1)
        # Only a strictly better token of a later tile wins: ties go to the lowest id, and what is excluded never does.
        is_better = top.values > best
        best = torch.where(is_better, top.values, best)
        winners = torch.where(is_better, start + top.indices, winners)
    return winners


def _tiles(num_rows: int, num_ids: int) -> Iterator[tuple[int, int]]:
    width = max(_TILE_ELEMENTS // num_rows, 256)
    for start in range(0, num_ids, width):
        yield start, min(start + width, num_ids)


def _index(rows: Sequence[int], ids: Sequence[int], scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device)
