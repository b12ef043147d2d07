"""Child processes as one: started in order, watched, their log lines merged, stopped in the opposite order. It knows no service."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shared.errors import OutriderError

_POLL_S = 0.2
_MAX_LINE_BYTES = 1 << 20

Write = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run.

    Args:
        name: of the child, on its log lines.
        command: program and arguments.
        environment: all of it.
        is_ready: whether it serves by now; asked until it says yes.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]


class ChildDied(OutriderError):
    """A child ended though nobody asked it to.

    Args:
        name: the child's.
        code: its exit code; negative for a signal.
    """

    reason = "CHILD_DIED"

    def __init__(self, name: str, code: int) -> None:
        how = f"exited with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        super().__init__(f"{name} {how}")
        self.name = name
        self.code = code


class Supervisor:
    """Runs children inside an `async with` block; none outlives it.

    Args:
        children: in the order in which they start; they stop in the opposite one.
        write: gets a child's name and one line of what it wrote.
        grace_s: seconds that a child gets to end after SIGTERM, before SIGKILL.
    """

    def __init__(self, children: Sequence[Child], write: Write, grace_s: float) -> None:
        self._children = children
        self._write = write
        self._grace_s = grace_s
        self._running: list[tuple[Child, asyncio.subprocess.Process]] = []
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            for child in self._children:
                await self._start(child)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.stop()

    async def wait_until_ready(self, on_progress: Callable[[Sequence[str]], None] = lambda _: None) -> None:
        """Return once every child is ready.

        Args:
            on_progress: gets the names of those that are not, again and again.

        Raises:
            ChildDied: one ended before.
        """
        waiting = list(self._children)
        while waiting:
            self._raise_if_one_died()
            on_progress([child.name for child in waiting])
            states = await asyncio.gather(*(child.is_ready() for child in waiting))
            waiting = [child for child, is_ready in zip(waiting, states, strict=True) if not is_ready]
            if waiting:
                await asyncio.sleep(_POLL_S)

    async def wait_until_one_dies(self) -> None:
        """Never returns.

        Raises:
            ChildDied: the first child that ends.
        """
        waits = [asyncio.create_task(process.wait()) for _, process in self._running]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._raise_if_one_died()

    def kill(self) -> None:
        """Do not wait any longer: SIGKILL to all."""
        for _, process in self._running:
            if process.returncode is None:
                process.kill()

    async def stop(self) -> None:
        """Stop the children, last started first, each one gone before the next is told. Their last lines are written."""
        try:
            for _, process in reversed(self._running):
                await self._end(process)
        finally:
            self.kill()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _start(self, child: Child) -> None:
        process = await asyncio.create_subprocess_exec(
            *child.command,
            env=dict(child.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # the terminal sends Ctrl-C to every process of its group, and the order is ours to keep
        )
        self._running.append((child, process))
        if process.stdout is not None:
            self._readers.append(asyncio.create_task(self._pass_on(child.name, process.stdout)))

    async def _pass_on(self, name: str, lines: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # a line beyond the limit: it is dropped, the child must not block on a full pipe
                continue
            if not line:
                return
            self._write(name, line.decode(errors="replace").rstrip("\r\n"))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._grace_s)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _raise_if_one_died(self) -> None:
        for child, process in self._running:
            if process.returncode is not None:
                raise ChildDied(child.name, process.returncode)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
