"""Top-k, top-p and min-p. It does not know where scores come from, and needs no stable sort to keep ties in id order.

All three keep the best n tokens by (-score, id), for some n. So n is found on sorted *values*, in which ties look alike, and the tokens are
found by comparing with the n-th value; among equals the lowest ids stay.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_EXCLUDED = float("-inf")
# Sorted values to look at first for top-p, and how many times more if the nucleus holds more, as it seldom does.
_FIRST_LOOK = 1024
_WIDER = 16


def truncate(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> Tensor:
    """Excludes tokens by top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024), in that order.

    Top-p keeps the smallest prefix of what top-k left whose share of the mass is at least p; at least one token always stays.

    Args:
        scores: [R, V], not changed; -inf where a token is excluded already.
        top_k: per row; 0 keeps all.
        top_p: per row, in (0, 1]; 1 keeps all.
        min_p: per row, in [0, 1], relative to the best token's probability.

    Returns:
        [R, V], -inf where a token is excluded. Rows do not influence each other.
    """
    scores = scores.clone()
    num_ids = scores.shape[-1]
    limits = [k if 0 < k < num_ids else num_ids for k in top_k]
    rows = [row for row, limit in enumerate(limits) if limit < num_ids or top_p[row] < 1.0]
    if rows:
        _keep_nucleus(scores, rows, [limits[row] for row in rows], [top_p[row] for row in rows], _FIRST_LOOK)
    if any(min_p):
        floors = scores.amax(-1).double() + torch.tensor(min_p, dtype=torch.float64, device=scores.device).log()
        scores.masked_fill_(scores < floors[:, None], _EXCLUDED)
    return scores


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
