"""Both services on this machine, as two children of this process. It knows no model and no engine."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from client.client import Client
from client.pair import Pair
from client.supervisor import Child, Supervisor, Write
from shared.address import dial_address, split_address
from shared.errors import CannotListen, OutriderError

_COLOURS = {"verifier": "cyan", "draft": "magenta"}
_SPINS = "6000"  # measured: docs/performance.md, "Two teams of threads"
_PREFIX_WIDTH = max(map(len, _COLOURS))

_Result = TypeVar("_Result")


def children(pair: Pair) -> list[Child]:
    """The two processes of a pair: the verifier first."""
    cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    environment = os.environ | {
        # Both processes have every core, and take turns: a thread that spins while it waits takes the other's turn, one that falls
        # asleep at once loses a tenth of its own between two operations. libgomp may spin for that long; other runtimes do not.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPINS,
        "OMP_NUM_THREADS": cores,
        "PYTHONUNBUFFERED": "1",
    }
    if sys.stderr.isatty():
        environment["FORCE_COLOR"] = "1"
    launch = (sys.executable, "-P", "-m", "client.cli")
    return [
        Child(
            "verifier",
            (*launch, "verifier", *pair.verifier_flags),
            environment,
            partial(_is_serving, pair.verifier.listen, "outrider.v1.VerifierService"),
        ),
        Child("draft", (*launch, "draft", *pair.draft_flags), environment, partial(_is_serving, pair.draft.listen, "outrider.v1.DraftService")),
    ]


def check_addresses_are_free(pair: Pair) -> None:
    """Find out before anything starts: another pair on the same ports would pass for this one.

    Raises:
        CannotListen: an address is in use, or not one of this machine's.
    """
    for address in (pair.verifier.listen, pair.verifier.link, pair.verifier.metrics, pair.draft.listen, pair.draft.metrics):
        if address:
            host, port = split_address(address)
            try:
                socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            except OSError as error:
                raise CannotListen(f"cannot listen on {address}: {os.strerror(error.errno or 0)}. Does another `outrider up` run?") from None


def free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until the last is found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def line_writer(console: Console, plain: bool = False) -> Write:
    """What writes a child's line behind its name in its colour; `plain`: as it is, for lines of JSON, which name their service."""

    def write(name: str, line: str) -> None:
        prefix = ("", "") if plain else (f"{name:>{_PREFIX_WIDTH}} │ ", _COLOURS.get(name, ""))
        console.print(Text.assemble(prefix, Text.from_ansi(line)), soft_wrap=True)

    return write


async def run_up(supervisor: Supervisor, console: Console, hint: str) -> None:
    """Run children until a signal; return after an orderly stop. A second signal stops them at once.

    Args:
        supervisor: of the children, not started.
        console: for progress and what we say ourselves.
        hint: said once all are ready.

    Raises:
        ChildDied: one ended by itself; the others are stopped by then.
    """
    told_to_stop = asyncio.Event()

    def on_signal() -> None:
        if told_to_stop.is_set():
            supervisor.kill()
        told_to_stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    async with supervisor:
        life = asyncio.create_task(_live(supervisor, console, hint))
        stop = asyncio.create_task(told_to_stop.wait())
        await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if life.cancel():
            console.print("stopping", style="dim")
        with suppress(asyncio.CancelledError):
            await life


async def until_terminated(work: Awaitable[_Result]) -> _Result:
    """Await work that SIGTERM ends in order, like Ctrl-C: no service that it has started stays behind.

    Raises:
        CancelledError: SIGTERM came.
    """
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


async def show_loading(supervisor: Supervisor, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until every child is ready, with a moving line that says who is not.

    Raises:
        ChildDied: one ended before.
    """
    began_at = clock()

    def tell(names: Sequence[str]) -> None:
        status.update(f"{' and '.join(names)} loading, {clock() - began_at:.0f} s")

    with console.status("starting") as status:
        await supervisor.wait_until_ready(tell)
    console.print(f"ready after {clock() - began_at:.1f} s", style="dim")


async def _live(supervisor: Supervisor, console: Console, hint: str) -> None:
    await show_loading(supervisor, console)
    console.print(hint, style="green", soft_wrap=True)
    await supervisor.wait_until_one_dies()


async def _is_serving(address: str, service: str) -> bool:
    try:
        # A new connection each time: an old one waits longer and longer between its own attempts.
        async with Client(dial_address(address)) as client:
            return await client.health(service, deadline_s=2.0) == "SERVING"
    except (OutriderError, TimeoutError):
        return False
