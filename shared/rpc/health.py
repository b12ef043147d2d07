"""Health of our services: told by a server (`Health`), asked by a client (`check`). Why a service is well or not is not known here."""

import asyncio
import enum
from collections.abc import Callable
from typing import Self

import grpc
import structlog
from grpc_health.v1 import health, health_pb2

from shared.rpc.channel import open_channel

_log = structlog.stdlib.get_logger(__name__)


class HealthStatus(enum.Enum):
    """What a client learns about a service."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNKNOWN_SERVICE = "unknown service"
    UNREACHABLE = "unreachable"


class Health:
    """`grpc.health.v1` for the services of one process; made by `Health.of`."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = services
        self.servicer = health.aio.HealthServicer()

    @classmethod
    async def of(cls, *services: str) -> Self:
        """Health of services by full name, such as `outrider.v1.VerifierService`, and of the process as a whole: "".

        All are NOT_SERVING until said otherwise.
        """
        made = cls(("", *services))
        await made.set_serving(False)  # gRPC's servicer starts with the whole process as SERVING
        return made

    async def set_serving(self, is_serving: bool) -> None:
        """Tell clients whether to come. Has no effect after `shut_down`."""
        for service in self._services:
            await self.set_service(service, is_serving)

    async def set_service(self, service: str, is_serving: bool) -> None:
        """The same for one service alone. One that was not given to `of` stands apart: `set_serving` says nothing about it."""
        await self.servicer.set(service, health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING)

    async def shut_down(self) -> None:
        """NOT_SERVING for good."""
        await self.servicer.enter_graceful_shutdown()


async def watch_engine(age_s: Callable[[], float], stall_timeout_s: float, told: Health, observe: Callable[[], None], every_s: float) -> None:
    """For ever: tells health whether an engine shows itself. Keepalive cannot, gRPC answers it by itself.

    Args:
        age_s: seconds since it last did.
        stall_timeout_s: beyond this it has stalled.
        told: the health of its process.
        observe: called each time too, for what no step of the engine tells.
        every_s: time between two looks.
    """
    serving = True
    while True:
        await asyncio.sleep(every_s)
        observe()
        age = age_s()
        if (age < stall_timeout_s) is not serving:
            serving = not serving
            _log.warning("engine shows itself again" if serving else "engine has stalled", age_s=round(age, 1))
            await told.set_serving(serving)


async def check(address: str, service: str = "", timeout_s: float = 5.0) -> HealthStatus:
    """Ask a server for the health of one of its services; "" asks for the process as a whole.

    Raises:
        ValueError: the address is none.
    """
    async with open_channel(address) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse] = channel.unary_unary(
            f"/{health.SERVICE_NAME}/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await ask(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return HealthStatus.UNKNOWN_SERVICE if error.code() is grpc.StatusCode.NOT_FOUND else HealthStatus.UNREACHABLE
    return HealthStatus.SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else HealthStatus.NOT_SERVING
