"""Prometheus metrics that every service has: how its calls end and how late its event loop is. Which calls there are it reads from the
services' descriptors, so that no peer can make label values."""

import asyncio
import time
from collections.abc import Callable, Iterable

import grpc
from google.protobuf import descriptor_pool
from prometheus_client import CollectorRegistry, Counter, Histogram

_PREFIX = "outrider_"
_TICK_S = 0.05
_LAG_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)

# Boards for gRPC expect Go's names.
_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}


class ServingMetrics:
    """Calls and event loop of one process. Every label value that can occur exists from the start.

    Args:
        registry: where they are registered.
        services: full names, such as `outrider.v1.VerifierService`; calls of others are not counted.
        clock: monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, services: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        labels = ("grpc_service", "grpc_method")
        handled = Counter(f"{_PREFIX}grpc_server_handled", "Calls that have ended, by method and status.", (*labels, "grpc_code"), registry=registry)
        handling = Histogram(f"{_PREFIX}grpc_server_handling_seconds", "How long calls took.", labels, buckets=_CALL_S, registry=registry)
        self._lag = Histogram(f"{_PREFIX}event_loop_lag_seconds", "How late the event loop is.", buckets=_LAG_S, registry=registry)
        self._clock = clock
        self._handled: dict[tuple[str, grpc.StatusCode], Counter] = {}
        self._handling: dict[str, Histogram] = {}
        pool = descriptor_pool.Default()
        for service in services:
            for method in pool.FindServiceByName(service).methods:
                path = f"/{service}/{method.name}"
                self._handling[path] = handling.labels(grpc_service=service, grpc_method=method.name)
                for code, name in _CODES.items():
                    self._handled[path, code] = handled.labels(grpc_service=service, grpc_method=method.name, grpc_code=name)

    def observe_call(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Takes a call that has ended; `method` as in `/outrider.v1.VerifierService/Generate`."""
        if method in self._handling:
            self._handled[method, code].inc()
            self._handling[method].observe(seconds)

    async def watch_loop(self) -> None:
        """Measures for ever how much later than asked for the running event loop comes back."""
        while True:
            due = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lag.observe(max(0.0, self._clock() - due))
