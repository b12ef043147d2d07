"""An event loop whose time is its own: it jumps to the next timer instead of waiting for it, so that a minute of load takes a moment."""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait; notes for how long it would have."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("nothing will ever happen again")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs to the end; `asyncio.sleep` takes no time, and `asyncio.get_running_loop().time()` says that it has."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def lateness(times: Sequence[float], due: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(at - planned) for at, planned in zip(times, due, strict=True))
