"""The small share of the time that is spent on finding out whether what did not pay has come to pay. Pure bookkeeping of seconds."""

from collections.abc import Iterable
from itertools import takewhile

_SHARE = 0.005  # of the time
_GRANTED_S = 0.5  # to learn what a drafter is like at all
_MOST_SAVED_S = 1.0  # a long good time does not end in a burst of probes


class Exploration:
    """Savings: every step adds a share of its time, every probe takes what it costs."""

    def __init__(self) -> None:
        self._saved_s = _GRANTED_S

    def earn(self, seconds: float) -> None:
        """A step has taken so long."""
        self._saved_s = min(_MOST_SAVED_S, self._saved_s + _SHARE * seconds)

    def choose(self, candidates: Iterable[int], seconds: float) -> list[int]:
        """As many of the candidates, the first ones, as are affordable at so much each; they are paid for."""
        return list(takewhile(lambda _: self.spend(seconds), candidates))

    def spend(self, seconds: float) -> bool:
        """Whether a probe that costs so much is affordable; if so it is paid for."""
        if seconds > self._saved_s:
            return False
        self._saved_s -= max(0.0, seconds)
        return True
