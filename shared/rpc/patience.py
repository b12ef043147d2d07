"""A limit on how long each of many waits may take, for next to nothing: `asyncio.timeout` around each costs as much as a small message does.

It knows no gRPC: what is waited for, and what its lateness means, is its user's business.
"""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """As an `asyncio.timeout` around each wait of one task, with a single timer for all of them.

        with closing(Patience(5.0)) as patience:
            async for ...:
                with patience:  # raises TimeoutError
                    await something()

    Args:
        seconds: how long one wait may take.
    """

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "it cancels the task that it is made in"
        self._task = task
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._num_cancels = 0  # that others had asked for before the wait began
        self._is_over = False
        self._timer = self._loop.call_later(seconds, self._look)

    def close(self) -> None:
        """No more waits."""
        self._timer.cancel()

    def __enter__(self) -> Self:
        """A wait begins."""
        self._num_cancels = self._task.cancelling()
        self._since = self._loop.time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """It is over, however it has ended.

        Raises:
            TimeoutError: because it took too long, and nobody else has cancelled the task.
        """
        self._since = None
        if not self._is_over:
            return
        self._is_over = False
        self._timer = self._loop.call_later(self._seconds, self._look)
        if self._task.uncancel() <= self._num_cancels and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _look(self) -> None:
        left = self._seconds if self._since is None else self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._is_over = True
            self._task.cancel()
