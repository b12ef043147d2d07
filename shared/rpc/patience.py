"""A limit on how long each of many waits may take, for next to nothing: `asyncio.timeout` around each costs as much as a small message does.

It knows no gRPC: what is waited for, and what its lateness means, is its user's business.
"""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """Cancels the task it was made in once a single wait takes too long; one timer does for all of them.

        with Patience(5.0) as patience:
            async for ...:
                patience.starts()
                try:
                    await something()
                except asyncio.CancelledError:
                    if patience.has_ended:
                        raise ...
                    raise
                patience.stops()

    Args:
        seconds: how long one wait may take.
    """

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "it cancels the task that it is made in"
        self._task = task
        self._num_cancels = task.cancelling()
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._timer.cancel()

    def starts(self) -> None:
        """A wait starts."""
        self._since = self._loop.time()

    def stops(self) -> None:
        """It is over."""
        self._since = None

    @property
    def has_ended(self) -> bool:
        """Whether it is this that has cancelled the task, and nobody else has. To be asked once, where the cancellation arrives."""
        return self._is_over and self._task.uncancel() <= self._num_cancels

    def _look(self) -> None:
        left = self._seconds if self._since is None else self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._is_over = True
            self._task.cancel()
