"""Who is given what a step gave, and when: a few streams at once, the others when the model runs. It knows no engine and no stream.

With many streams the end of a step is the worst moment for all of them: drafters wait for its commit then, and the next step for their guesses,
and writing to 64 streams keeps the event loop and the interpreter for longer than either. While the model runs nobody else wants them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from verifier_service.request import Emission

AT_ONCE = 8
"""Streams that are served in one turn of the loop: a link is not to wait behind all of them."""
_HELD_S = 0.02  # so long at most the others wait for the model to run: it may have nothing to do


class Delivery:
    """Emissions on their way to the streams, in order. Used on the event loop only.

    Args:
        give: takes a sequence number and what is for it; must not block.
    """

    def __init__(self, give: Callable[[int, Emission], None]) -> None:
        self._give = give
        self._waiting: deque[tuple[int, Emission]] = deque()
        self._next: asyncio.Handle | None = None

    def add(self, emissions: Iterable[tuple[int, Emission]]) -> None:
        """Takes what a step gave. Links, which were told of the step before this, get the loop's next turn to send it."""
        self._waiting.extend(emissions)
        if self._waiting and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._give_some)

    def release(self) -> None:
        """The model runs: gives out what waits, a few streams in each turn of the loop."""
        if self._next is not None:
            self._next.cancel()
        self._give_few()
        self._next = asyncio.get_running_loop().call_soon(self.release) if self._waiting else None

    def _give_some(self) -> None:
        self._give_few()
        self._next = asyncio.get_running_loop().call_later(_HELD_S, self.release) if self._waiting else None

    def _give_few(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._give(*self._waiting.popleft())
