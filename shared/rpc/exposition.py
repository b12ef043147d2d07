"""Prometheus metrics over HTTP, on a port of their own. Which metrics there are is not known here."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from shared.address import join_address, split_address
from shared.errors import CannotListen


@contextmanager
def exposition(registry: CollectorRegistry, address: str) -> Iterator[str | None]:
    """Serve a registry at /metrics for as long as the context lives.

    Args:
        registry: what is served.
        address: `host:port`; port 0 takes a free one, an empty address serves nothing.

    Yields:
        The address with the port in use, or None if nothing is served.

    Raises:
        CannotListen: the address cannot be bound.
    """
    if not address:
        yield None
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` series beside every counter would double what is scraped
    host, port = split_address(address)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise CannotListen(f"metrics cannot be served at {address}: {error.strerror or error}") from error
    try:
        yield join_address(host, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
