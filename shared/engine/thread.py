"""The one thread that touches a model and its KV. It takes commands, runs steps and hands their results out.

It does not know what a step does: both services give it their own engine. Commands are closures run between steps, so an
engine needs no locks. Results leave by one callback per step.
"""

import asyncio
import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_log = logging.getLogger(__name__)
_IDLE_BEAT_S = 1.0  # an idle thread shows itself this often
_SWITCH_S = 0.0001


def settle_interpreter() -> None:
    """Makes the interpreter fit for an engine thread beside an event loop; to be called once all is loaded.

    The two hand work to each other several times in a round, and whoever gets some waits for the other to let go of the interpreter: 5 ms
    unless told otherwise. And what is loaded stays: the garbage collector need not look at all of it again and again.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()


async def before_engine(work: Callable[[], T]) -> T:
    """Runs what computes before the engine does, such as loading, on a thread that ends with it.

    OpenMP keeps a team of threads for each thread that has ever computed. While all teams together have more threads than there are
    cores, libgomp lets none of them wait for the next operation awake, and a step of a thousand operations takes a tenth longer.
    """
    executor = ThreadPoolExecutor(1, "before-engine")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)


class Steppable(Protocol[T_co]):
    """What the thread runs."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def wait_until(self, now: float) -> float:
        """Time before which the next step had better not start, unless a command comes in; `now` or less to start at once."""
        ...

    def step(self, now: float) -> T_co:
        """Runs one step. Must not raise for anything that a request or a peer can cause."""
        ...


class EngineThread(Generic[T]):
    """Runs an engine on a thread of its own.

    Args:
        engine: touched by nobody else once the thread has started.
        deliver: called on the thread after each step with what it returned; must not block.
        on_crash: called on the thread with the exception if a step raises; the thread then ends.
        clock: monotonic seconds.
        name: of the thread.
    """

    def __init__(
        self, engine: Steppable[T], deliver: Callable[[T], None], on_crash: Callable[[BaseException], None], clock: Callable[[], float], name: str
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_crash = on_crash
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._beat = clock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` on the thread, after those posted before it and before the next step. Safe from any thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after the step it is in, and waits for that. Commands not yet run are dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def age_s(self) -> float:
        """Seconds since the thread last showed itself: long means that a step hangs, or that the thread is dead."""
        return self._clock() - self._beat

    def _take(self, until: float) -> list[Callable[[], None]]:
        """All commands; waits for one until then."""
        with self._wake:
            if not self._commands and not self._stopping and (timeout := until - self._clock()) > 0:
                self._wake.wait(min(timeout, _IDLE_BEAT_S))
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _run(self) -> None:
        try:
            until = self._clock()
            while not self._stopping:
                self._beat = self._clock()
                for command in self._take(until):
                    command()
                now = self._clock()
                # Asked for without the lock: whoever posts, the event loop above all, is not to wait for the answer.
                until = self._engine.wait_until(now) if self._engine.has_work else now + _IDLE_BEAT_S
                if not self._stopping and until <= now:
                    self._deliver(self._engine.step(now))
        except BaseException as error:  # the thread's boundary: whoever started it must know
            _log.exception("engine thread ends")
            self._on_crash(error)
