"""What a step costs, as a function of the tokens in it. Pure: it knows neither models nor clocks, only (tokens, seconds) pairs.

A monotone, piecewise linear curve through knots that are measured at the start, refined by every step that is observed: most of a step's
deviation is taken for the machine's pace at the moment and scales the whole curve, a little of it bends the curve where it was seen.
"""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_PACE = 0.1  # weight of a step's deviation in the scale of the whole curve
_SHAPE = 0.02  # the same in the knots beside it
_LARGEST_DEVIATION = 1.3  # a step that was slower or faster than expected by more than this factor counts as this much
_DOUBLINGS = 13  # knots are 1, 2, 4, ... tokens where nothing was measured


class StepCost:
    """Seconds of a step by its tokens.

    Args:
        points: seconds measured for numbers of tokens, all positive; none: the first step observed stands for all sizes.
    """

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        measured = sorted((points or {}).items())
        self._knots = np.array([rows for rows, _ in measured] or [1 << i for i in range(_DOUBLINGS)], dtype=np.float64)
        self._values = np.array([seconds for _, seconds in measured], dtype=np.float64)
        self._scale = 1.0
        self._bend()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured or observed."""
        return len(self._values) > 0

    @property
    def points(self) -> dict[int, float]:
        """The curve's knots: seconds by tokens, never falling. Empty while nothing is known."""
        return {int(rows): float(seconds) for rows, seconds in zip(self._knots, self._curve, strict=False)}

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step of so many tokens. Something must be known."""
        knots, values = self._lists  # asked for many times in a step: numpy takes ten times as long for one number
        right = min(max(1, bisect_left(knots, num_rows)), len(values) - 1)
        if right <= 0 or num_rows <= knots[0]:
            return values[0]
        slope = (values[right] - values[right - 1]) / (knots[right] - knots[right - 1])
        return values[right - 1] + slope * (num_rows - knots[right - 1])

    def seconds_of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Expected seconds for each number of tokens; beyond the last knot the last slope goes on. Something must be known."""
        values = self._curve
        expected = np.interp(rows, self._knots, values)
        if len(values) > 1:
            slope = (values[-1] - values[-2]) / (self._knots[-1] - self._knots[-2])
            expected += slope * np.maximum(0.0, rows - self._knots[-1])
        return expected

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes note of a step."""
        if seconds <= 0:
            return
        if not self.is_known:
            self._values = np.full(len(self._knots), seconds)
            self._bend()
            return
        deviation = min(max(seconds / self.seconds(num_rows), 1 / _LARGEST_DEVIATION), _LARGEST_DEVIATION) - 1.0
        self._scale *= 1.0 + _PACE * deviation
        knots, _ = self._lists
        right = min(max(1, bisect_left(knots, num_rows)), len(knots) - 1)
        left = max(0, right - 1)
        span = knots[right] - knots[left]
        share = min(max((num_rows - knots[left]) / span, 0.0), 1.0) if span else 0.0
        self._values[left] *= 1.0 + _SHAPE * deviation * (1.0 - share)
        self._values[right] *= 1.0 + _SHAPE * deviation * share
        self._bend()

    def _bend(self) -> None:
        """The curve is another one from now on."""
        self._curve: NDArray[np.float64] = np.maximum.accumulate(self._values) * self._scale
        self._lists: tuple[list[float], list[float]] = self._knots.tolist(), self._curve.tolist()
