"""A peer's worker from the driver's side: a process that is asked, stopped while others run, and ended. It knows no engine."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.peers.lines import Answer, Job, to_answer, to_line

_ROOT = Path(__file__).resolve().parents[2]
_MAX_LINE_BYTES = 1 << 26
_END_S = 20.0


class Worker:
    """Runs inside an `async with` block, which begins when it has loaded; stopped (SIGSTOP) but while it answers.

    Args:
        command: program and arguments, run in the repository's root.
        log: file for all that it prints besides answers.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.description: Mapping[str, Any] = {}
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=_ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,  # signals go to its group: an engine may have processes of its own
            )
        try:
            self.description = (await self._read())["ready"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._end()

    @property
    def pid(self) -> int | None:
        """Of the process; None before it starts."""
        return None if self._process is None else self._process.pid

    async def ask(self, job: Job) -> Answer:
        """Have a job done.

        Raises:
            RuntimeError: it failed, or the worker is gone.
        """
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the worker does not run")
        self._signal(signal.SIGCONT)
        self._process.stdin.write(to_line(job).encode())
        await self._process.stdin.drain()
        message = await self._read()
        self._signal(signal.SIGSTOP)
        return to_answer(message)

    async def _read(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the worker does not run")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended; what it said is in {self._log}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _end(self) -> None:
        """The end of its input ends it; a signal does if that takes too long."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            pass
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()
