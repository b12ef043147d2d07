"""A grpc.aio server from nothing to bound, and its orderly end. What it serves is not known here."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.address import join_address, split_address
from shared.errors import CannotListen
from shared.rpc.guards import Gate
from shared.rpc.health import Health
from shared.rpc.interceptors import CallInterceptor
from shared.rpc.options import server_options

_log = structlog.stdlib.get_logger(__name__)
_LAST_WORDS_S = 1.0  # for what was told to end just now, as a link's goodbye


def make_server(interceptor: CallInterceptor, max_message_bytes: int, health_service: Health, services: Sequence[str]) -> grpc.aio.Server:
    """A server with health and reflection; our own services are added by the caller. Must be called in the running loop.

    Args:
        interceptor: around every call.
        max_message_bytes: of one message, either way.
        health_service: may be shared by the servers of a process.
        services: full names for reflection, such as `outrider.v1.VerifierService`.
    """
    server = grpc.aio.server(interceptors=[interceptor], options=server_options(max_message_bytes))
    health_pb2_grpc.add_HealthServicer_to_server(health_service.servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


def add_to_running(add: Callable[[Any, Any], None], servicer: object, server: grpc.aio.Server) -> None:
    """Add a servicer to a server that has started.

    Args:
        add: generated, such as `add_VerifierServiceServicer_to_server`.
        servicer: what it adds.
        server: runs already.
    """
    add(servicer, _Running(server))


class _Running:
    """What a generated `add_..._to_server` needs. gRPC takes generic handlers at any time; the registered ones, which only save a look-up
    by name, it takes before the start, and warns afterwards."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        del service, handlers


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind a server to an address; port 0 takes a free one.

    Returns:
        The address with the port in use.

    Raises:
        CannotListen: the address is in use, or is none of this machine's.
        ValueError: the address is none.
    """
    host, _ = split_address(address)
    try:
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise CannotListen(f"cannot listen on {address}: it is in use, or not an address of this machine")
    return join_address(host, port)


async def run_until_signal(
    servers: Sequence[grpc.aio.Server], health_service: Health, gate: Gate, grace_s: float, end_links: Callable[[], None] | None = None
) -> None:
    """Wait for SIGTERM or SIGINT, then end in order; a second signal ends at once. The engine is stopped by the caller, afterwards.

    The order: health says NOT_SERVING, new completions are refused with UNAVAILABLE and reason DRAINING, those that run get `grace_s`
    seconds, links say goodbye, servers stop.

    Args:
        servers: started; stopped when this returns.
        health_service: of the process.
        gate: of the process.
        grace_s: seconds for running completions.
        end_links: tells the links to end.
    """
    with _stop_signals() as signals:
        _log.info("stopping", signal=await signals.get(), grace_s=grace_s)
        orderly = asyncio.create_task(_drain(servers, health_service, gate, grace_s, end_links))
        second = asyncio.create_task(signals.get())
        try:
            await asyncio.wait((orderly, second), return_when=asyncio.FIRST_COMPLETED)
            if not orderly.done():
                _log.info("stopping at once", signal=second.result())
        finally:
            orderly.cancel()
            second.cancel()
            await asyncio.gather(orderly, second, return_exceptions=True)
            await asyncio.gather(*(server.stop(0) for server in servers))


async def _drain(
    servers: Sequence[grpc.aio.Server], health_service: Health, gate: Gate, grace_s: float, end_links: Callable[[], None] | None
) -> None:
    await health_service.shut_down()
    await gate.drain(grace_s)
    if end_links is not None:
        end_links()
    await asyncio.gather(*(server.stop(_LAST_WORDS_S) for server in servers))


@contextmanager
def _stop_signals() -> Iterator[asyncio.Queue[str]]:
    """Names of the signals that ask the process to stop, as they come in."""
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[str]()
    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    try:
        yield signals
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)
