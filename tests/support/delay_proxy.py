"""A TCP relay on a thread of its own: it delays what it carries, can cut it, and can be pointed elsewhere. It knows no protocol."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_CHUNK = 1 << 16


class DelayProxy:
    """A relay to `target`, a `host:port`, at `address`.

    Args:
        target: where connections go; may be changed: it counts for those made from then on.
        delay_s: how long a byte takes, each way; order is kept.
    """

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self.target = target
        self.address = ""
        self._delay_s = delay_s
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start()).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._run(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Breaks every connection; new ones are taken."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def _run(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def _stop(self) -> None:
        self._server.close()
        self._abort_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            host, _, port = self.target.rpartition(":")
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                self._open.add(far_writer)
                try:
                    await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
                finally:
                    self._open.discard(far_writer)
                    far_writer.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until either end of it is gone."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, chunk = await chunks.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not chunk:
                    writer.transport.abort()
                    return
                writer.write(chunk)
                await writer.drain()

        task = asyncio.create_task(write())
        try:
            chunk = b"-"
            while chunk:
                try:
                    chunk = await reader.read(_CHUNK)
                except OSError:
                    chunk = b""
                chunks.put_nowait((loop.time() + self._delay_s, chunk))
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
