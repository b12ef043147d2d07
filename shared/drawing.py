"""Draws by inverse transform, for rejection mode: the drafter's guesses and the verifier's residual. It does not know which of the two it serves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.link import MAX_DISTRIBUTION_PAIRS, Distribution


def invert(weights: Tensor, draws: Tensor) -> Tensor:
    """Draws an index in proportion to the weights.

    Args:
        weights: [R, N] float64, none negative, each row with a positive one; they need not sum to 1.
        draws: [R] float64 uniforms in the open interval (0, 1).

    Returns:
        [R] int64; the weight there is positive.
    """
    cumulative = weights.cumsum(-1)
    thresholds = draws[:, None] * cumulative[:, -1:]
    # The first index whose cumulative weight exceeds the threshold: it is where the sum grows, so its own weight is positive.
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0]


def to_wire(scores: Tensor, max_pairs: int = MAX_DISTRIBUTION_PAIRS) -> list[Distribution]:
    """Rounds distributions to the form that crosses the link. Guesses are drawn from this form, so nothing is truncated after a draw.

    Args:
        scores: [R, V] from `shared.picking.process`; -inf where a token is excluded.
        max_pairs: most tokens to keep; the best stay.

    Returns:
        One distribution per row, best token first: float32 values, all positive, sum 1 up to rounding.
    """
    kept = scores.topk(min(max_pairs, scores.shape[-1]))
    # The softmax of the kept scores is the renormalised distribution.
    weights = kept.values.softmax(-1, dtype=torch.float64).to(torch.float32).tolist()
    return [_positive_part(ids, row) for ids, row in zip(kept.indices.tolist(), weights, strict=True)]


def pad(distributions: Sequence[Distribution]) -> tuple[Tensor, Tensor]:
    """Distributions as tensors: ids [R, N] int64 and weights [R, N] float64, id 0 with weight 0 behind the shorter ones."""
    width = max((len(distribution.token_ids) for distribution in distributions), default=0) or 1
    ids = [[*each.token_ids, *[0] * (width - len(each.token_ids))] for each in distributions]
    weights = [[*each.probabilities, *[0.0] * (width - len(each.token_ids))] for each in distributions]
    shape = (len(distributions), width)
    return torch.tensor(ids, dtype=torch.int64).view(shape), torch.tensor(weights, dtype=torch.float64).view(shape)


def _positive_part(ids: list[int], weights: list[float]) -> Distribution:
    pairs = [(token_id, weight) for token_id, weight in zip(ids, weights, strict=True) if weight > 0.0]
    return Distribution(tuple(token_id for token_id, _ in pairs), tuple(weight for _, weight in pairs))
