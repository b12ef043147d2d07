"""How often a place comes free, for telling who is refused when to ask again. It knows no request."""

from collections.abc import Callable

_NEWEST_SHARE = 0.2  # weight of the newest interval in the mean
_UNKNOWN_S = 1.0
_LEAST_S, _MOST_S = 0.1, 30.0


class Turnover:
    """Times between the ends of requests.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._interval_s: float | None = None
        self._since = clock()
        self._num_refused = 0

    def begin(self) -> None:
        """Work begins after none: no place can have come free meanwhile."""
        self._since = self._clock()

    def end(self) -> None:
        """A request has ended."""
        now = self._clock()
        newest = min(now - self._since, _MOST_S)
        self._interval_s = newest if self._interval_s is None else self._interval_s + _NEWEST_SHARE * (newest - self._interval_s)
        self._since, self._num_refused = now, 0

    def refuse(self) -> float:
        """Seconds after which the one that is refused now had better ask again: those refused since a place came free are sent one after another."""
        self._num_refused += 1
        interval_s = _UNKNOWN_S if self._interval_s is None else max(self._interval_s, self._clock() - self._since)
        return min(max(_LEAST_S, interval_s * self._num_refused), _MOST_S)
