"""Is A faster than B: the ratio of paired measurements, with an interval.

Owns the way two things are compared in this repository: side by side, in turns, pair by pair. It does not know what was measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

from shared.errors import OutriderError

MIN_PAIRS = 7
"""Fewer pairs say nothing: the interval would be the range of what happened to be seen."""

BOOTSTRAP = "[95% bootstrap]"
"""Heading of a column of ratios."""

COVERAGE = "the percentile bootstrap's 95% interval, which holds the true median less often: in 87.5% of cases with 7 pairs, in 94% with 21"
"""What the interval is, to be said beside it."""

_SEED = 20261130
_NUM_RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of paired ratios and its 95% bootstrap interval.

    Args:
        median: of the pairs' ratios.
        low: lower end of the interval.
        high: upper end.
        num_pairs: ratios it is made of.
    """

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def require_scipy() -> None:
    """Tells in time, before anything is measured.

    Raises:
        OutriderError: scipy is not installed.
    """
    if find_spec("scipy") is None:
        raise OutriderError("intervals need scipy: pip install 'outrider[bench]'")


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median of numerator / denominator over pairs, with the percentile bootstrap's 95% interval of that median (fixed seed).

    With seven pairs the interval goes from the second smallest ratio to the second largest and holds the true median in 87.5% of all
    cases for any continuous distribution, not 95%; from 20 pairs on it is 94% or more. Few pairs that all agree say more than the interval.

    Args:
        numerators: one figure of each pair, positive.
        denominators: the other figure of the same pairs, positive.

    Raises:
        ValueError: the lengths differ, there is no pair, or a figure is not positive and finite.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"pairs need as many numerators as denominators, and one at least: {len(numerators)} and {len(denominators)}")
    if not all(math.isfinite(figure) and figure > 0 for figure in (*numerators, *denominators)):
        raise ValueError("a ratio needs figures that are positive and finite")
    import numpy as np
    from scipy.stats import bootstrap

    ratios = np.array(numerators, dtype=float) / np.array(denominators, dtype=float)
    median = float(np.median(ratios))
    if all(left == right for left, right in pairwise(ratios)):  # also: a single pair
        return Ratio(median, median, median, len(ratios))
    found = bootstrap((ratios,), np.median, n_resamples=_NUM_RESAMPLES, method="percentile", rng=np.random.default_rng(_SEED))
    return Ratio(median, float(found.confidence_interval.low), float(found.confidence_interval.high), len(ratios))


def interleave(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Calls both `pairs` times in turns, A B, B A, A B, ...: what drifts hits both, and neither is always the first.

    Returns:
        What A returned and what B returned, by pair.
    """
    of_a: list[float] = []
    of_b: list[float] = []
    for index in range(pairs):
        for measure, figures in ((a, of_a), (b, of_b)) if index % 2 == 0 else ((b, of_b), (a, of_a)):
            figures.append(measure())
    return of_a, of_b
