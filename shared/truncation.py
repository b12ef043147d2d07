"""Top-k, top-p and min-p. It does not know where scores come from, and needs no stable sort to keep ties in id order.

All three keep the best n tokens by (-score, id), for some n. So n is found on sorted *values*, in which ties look alike, and the tokens are
found by comparing with the n-th value; among equals the lowest ids stay.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.row_chunks import Floats, map_chunks

_EXCLUDED = float("-inf")
# Ids of a group, of which only the best is looked at first for top-k.
_GROUP = 64
# On a device: sorted values to look at first for top-p, and how many times more if the nucleus holds more, as it seldom does.
_FIRST_LOOK = 1024
_WIDER = 16


def truncate(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> None:
    """Excludes tokens by top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024), in that order, in place.

    Top-p keeps the smallest prefix of what top-k left whose share of the mass is at least p; at least one token always stays.

    Args:
        scores: [R, V] float32 or float64; -inf where a token is excluded already, and afterwards. Rows do not influence each other.
        top_k: per row; 0 keeps all.
        top_p: per row, in (0, 1]; 1 keeps all.
        min_p: per row, in [0, 1], relative to the best token's probability.
    """
    if scores.device.type == "cpu":

        def run(chunk: Floats, rows: slice) -> None:
            for row, k, share, floor in zip(chunk, top_k[rows], top_p[rows], min_p[rows], strict=True):
                _truncate_row(row, k, share, floor)

        map_chunks(scores, run)
    else:
        truncate_on_device(scores, top_k, top_p, min_p)


def _truncate_row(row: Floats, top_k: int, top_p: float, min_p: float) -> None:
    num_ids, top = len(row), float(row.max())
    if not math.isfinite(top):
        return
    floor = top + math.log(min_p) if min_p else _EXCLUDED
    has_limit = 0 < top_k < num_ids
    if not has_limit and top_p == 1.0:
        row[row.astype(np.float64) < floor] = _EXCLUDED
        return
    total = 0.0
    if has_limit:
        ids = np.flatnonzero(row >= _bound_of_kth(row, top_k))
    else:
        weights = np.exp(row.astype(np.float64) - top)
        total = float(weights.sum())
        # All that is left out here is less than what may be left out.
        ids = np.flatnonzero(weights >= (1.0 - top_p) * total / num_ids * 0.999)
    values = row[ids]
    num_kept = min(top_k, len(ids)) if has_limit else len(ids)
    ordered = np.sort(values)[::-1][:num_kept]
    if top_p < 1.0:
        mass = np.cumsum(np.exp(ordered.astype(np.float64) - top))
        num_kept = min(num_kept, 1 + int(np.count_nonzero(mass < top_p * (total or mass[-1]))))
    last = ordered[num_kept - 1]
    is_above = values > last
    ties = np.flatnonzero(values == last)[: num_kept - np.count_nonzero(is_above)]
    is_above[ties] = True
    is_above &= values.astype(np.float64) >= floor
    row.fill(_EXCLUDED)
    row[ids[is_above]] = values[is_above]


def _bound_of_kth(row: Floats, k: int) -> float:
    """A score that at least k tokens reach, and seldom many more: the k-th best of the best of groups."""
    num_groups = len(row) // _GROUP
    if 4 * k <= num_groups:
        row = row[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(0)
    return float(np.partition(row, len(row) - k)[len(row) - k])


def truncate_on_device(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> None:
    """The same in torch, on any device."""
    num_ids = scores.shape[-1]
    limits = [k if 0 < k < num_ids else num_ids for k in top_k]
    rows = [row for row, limit in enumerate(limits) if limit < num_ids or top_p[row] < 1.0]
    if rows:
        _keep_nucleus(scores, rows, [limits[row] for row in rows], [top_p[row] for row in rows], _FIRST_LOOK)
    if any(min_p):
        floors = scores.amax(-1).double() + torch.tensor(min_p, dtype=torch.float64, device=scores.device).log()
        scores.masked_fill_(scores < floors[:, None], _EXCLUDED)


def _keep_nucleus(scores: Tensor, rows: Sequence[int], limits: Sequence[int], shares: Sequence[float], first_look: int) -> None:
    """Applies top-k (`limits`) and top-p (`shares`) to `rows` of `scores`, in place, on the best `first_look` values where that is enough."""
    num_ids = scores.shape[-1]
    chosen = scores[list(rows)]
    limit = torch.tensor(limits, device=scores.device)
    share = torch.tensor(shares, dtype=torch.float64, device=scores.device)
    width = min(num_ids, max(first_look if k == num_ids else k for k in limits))
    values = chosen.topk(width).values
    best = values[:, :1].double()
    # Sums are cumulative everywhere: cumsum adds one by one, so a row's figures do not depend on how wide the other rows are.
    mass = (values.double() - best).exp_().cumsum_(-1)
    total = mass.gather(1, (limit.clamp(max=width) - 1)[:, None])
    unlimited = [i for i, k in enumerate(limits) if k == num_ids]
    if unlimited and width < num_ids:
        total[unlimited] = (chosen[unlimited].double() - best[unlimited]).exp_().cumsum_(-1)[:, -1:]
    num_kept = 1 + (mass < share[:, None] * total).sum(-1)
    num_kept = torch.where(share < 1.0, num_kept, num_ids).minimum(limit)
    is_open = num_kept > width
    _keep_best(chosen, values, num_kept.clamp(max=width))
    closed = (~is_open).nonzero()[:, 0]
    row_index = torch.tensor(rows, device=scores.device)
    scores[row_index[closed]] = chosen[closed]
    if len(closed) < len(rows):
        again = is_open.nonzero()[:, 0].tolist()
        _keep_nucleus(scores, [rows[i] for i in again], [limits[i] for i in again], [shares[i] for i in again], first_look * _WIDER)


def _keep_best(scores: Tensor, values: Tensor, num_kept: Tensor) -> None:
    """Keeps the best tokens by (-score, id), in place. [R, V] scores, their best values in order [R, W], how many to keep [R] in 1..W."""
    last = values.gather(1, num_kept[:, None] - 1)
    room = num_kept - (values > last).sum(-1)
    is_tie = scores == last
    crowded = (is_tie.sum(-1) > room).nonzero()[:, 0]
    excluded = scores < last
    if len(crowded):
        excluded[crowded] |= is_tie[crowded] & (is_tie[crowded].cumsum(-1) > room[crowded, None])
    scores.masked_fill_(excluded, _EXCLUDED)
