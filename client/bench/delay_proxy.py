"""A TCP relay that delays what it carries, in a process of its own for a benchmark or on threads for a test. It knows no protocol.

    python -m client.bench.delay_proxy --listen HOST:PORT --target HOST:PORT --delay-ms MS

Two threads carry one direction of a connection: one reads and notes when each chunk is due, the other sleeps until then and sends. A thread's
sleep is precise to about 0.1 ms, where an event loop's timer counts in whole milliseconds. Chunks do not wait for one another, so neither the
order nor the bandwidth is touched.
"""

import argparse
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from shared.address import split_address

_CHUNK = 1 << 18
_CONNECT_S = 10.0


class DelayProxy:
    """A relay to `target`, a `host:port`, at `address`.

    Args:
        target: where connections go; may be changed: it counts for those made from then on.
        delay_s: how long a byte takes, each way; order is kept.
        listen: where to listen; port 0 is any.
    """

    def __init__(self, target: str, delay_s: float = 0.0, listen: str = "127.0.0.1:0") -> None:
        self.target = target
        self.address = ""
        self._delay_s = delay_s
        self._listen = listen
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._server = socket.create_server(split_address(self._listen))
        host, port = self._server.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._is_open = True
        self._spawn(self._accept_all, "accepting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._is_open = False
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone would not
        self._server.close()
        while self._threads:
            self.cut()
            self._threads.pop().join()

    def cut(self) -> None:
        """Breaks every connection; new ones are taken."""
        with self._lock:
            for each in self._open:
                _break(each)

    def _spawn(self, work: Callable[[], None], what: str) -> None:
        thread = threading.Thread(target=work, name=f"delay proxy, {what}", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept_all(self) -> None:
        while self._is_open:
            try:
                near, _ = self._server.accept()
            except OSError:
                continue
            try:
                far = socket.create_connection(split_address(self.target), _CONNECT_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._carry(source, sink)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """One direction, until either end of it is gone."""
        chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            chunk = b"-"
            while chunk:
                try:
                    chunk = source.recv(_CHUNK)
                except OSError:
                    chunk = b""
                chunks.put((time.monotonic() + self._delay_s, chunk))

        def write() -> None:
            while True:
                due, chunk = chunks.get()
                if (ahead := due - time.monotonic()) > 0:
                    time.sleep(ahead)
                try:
                    if not chunk:
                        break
                    sink.sendall(chunk)
                except OSError:
                    break
            # Ends both directions: a link of which only half works is none.
            for each in (source, sink):
                _break(each)
            with self._lock:
                self._open.discard(sink)
            sink.close()

        self._spawn(read, "reading")
        self._spawn(write, "writing")


def _break(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """The command: relays until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--delay-ms", type=float, required=True, help="each way")
    arguments = parser.parse_args()
    with DelayProxy(arguments.target, arguments.delay_ms / 1e3, arguments.listen):
        threading.Event().wait()


if __name__ == "__main__":
    main()
