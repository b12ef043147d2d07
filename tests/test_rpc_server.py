import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from outrider.v1 import generate_pb2, info_pb2, verifier_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from shared.errors import CannotListen, Unavailable
from shared.rpc.channel import open_channel
from shared.rpc.exposition import exposition
from shared.rpc.guards import Gate
from shared.rpc.health import Health, HealthStatus, check
from shared.rpc.interceptors import CallInterceptor
from shared.rpc.server import bind, make_server, run_until_signal
from shared.rpc.status import from_rpc_error
from tests.support.rpc import serving

SERVICE = "outrider.v1.VerifierService"


class _Servicer(verifier_pb2_grpc.VerifierServiceServicer):
    """A completion that ends when it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:  # noqa: N802
        del request, context
        yield generate_pb2.GenerateResponse(started=generate_pb2.Started())
        await self.let_go.wait()
        yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished())

    async def GetInfo(self, request: info_pb2.GetInfoRequest, context: Any) -> info_pb2.GetInfoResponse:  # noqa: N802
        del request, context
        return info_pb2.GetInfoResponse(version="1")


class _Running:
    """A service as its main runs it, in a task of this process."""

    def __init__(self, health: Health, grace_s: float) -> None:
        self.servicer, self.health, self.gate = _Servicer(), health, Gate("verifier")
        self.links_ended = asyncio.Event()
        self._server = make_server(CallInterceptor([self.gate]), 4 << 20, self.health, [SERVICE])
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.servicer, self._server)
        self.address = bind(self._server, "127.0.0.1:0")
        self._grace_s = grace_s

    async def start(self) -> asyncio.Task[None]:
        await self._server.start()
        self.gate.open()
        await self.health.set_serving(True)
        task = asyncio.create_task(run_until_signal([self._server], self.health, self.gate, self._grace_s, self.links_ended.set))
        await asyncio.sleep(0)  # one turn of the loop: the task has put its signal handlers in place
        return task


async def _until_draining(stub: "verifier_pb2_grpc.VerifierServiceAsyncStub") -> Unavailable:
    while True:
        call = stub.Generate(generate_pb2.GenerateRequest())
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            assert isinstance(refusal, Unavailable)
            return refusal
        finally:
            call.cancel()


async def test_sigterm_lets_running_completions_finish_and_refuses_new_ones() -> None:
    service = _Running(await Health.of(SERVICE), grace_s=60)
    task = await service.start()
    async with open_channel(service.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        running = stub.Generate(generate_pb2.GenerateRequest())
        await running.read()
        os.kill(os.getpid(), signal.SIGTERM)
        refusal = await _until_draining(stub)
        assert (refusal.reason, refusal.retry_after_s) == ("DRAINING", 1.0)
        assert await check(service.address, SERVICE) is HealthStatus.NOT_SERVING
        assert await check(service.address) is HealthStatus.NOT_SERVING
        assert (await stub.GetInfo(info_pb2.GetInfoRequest())).version == "1"
        assert not service.links_ended.is_set()
        service.servicer.let_go.set()
        last = await running.read()
        assert isinstance(last, generate_pb2.GenerateResponse)
        assert last.WhichOneof("frame") == "finished"
        assert await running.code() is grpc.StatusCode.OK
    await task
    assert service.links_ended.is_set()
    assert await check(service.address, timeout_s=1) is HealthStatus.UNREACHABLE


async def test_what_is_not_finished_within_the_grace_is_ended() -> None:
    service = _Running(await Health.of(SERVICE), grace_s=0)
    task = await service.start()
    async with open_channel(service.address) as channel:
        running = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(generate_pb2.GenerateRequest())
        await running.read()
        os.kill(os.getpid(), signal.SIGINT)
        await task
        assert await running.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_second_signal_ends_at_once() -> None:
    service = _Running(await Health.of(SERVICE), grace_s=3600)
    task = await service.start()
    async with open_channel(service.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        running = stub.Generate(generate_pb2.GenerateRequest())
        await running.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await _until_draining(stub)
        os.kill(os.getpid(), signal.SIGTERM)
        await task
        assert await running.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_an_address_in_use_is_a_clear_error() -> None:
    async with serving(lambda _: None) as address:
        second = make_server(CallInterceptor(), 4 << 20, await Health.of(), [])
        with pytest.raises(CannotListen, match=address):
            bind(second, address)
        await second.stop(0)


async def test_health_is_told_per_service() -> None:
    health = await Health.of(SERVICE)
    async with serving(lambda _: None, health=health) as address:
        await health.set_serving(False)
        assert await check(address, SERVICE) is HealthStatus.NOT_SERVING
        await health.set_serving(True)
        assert await check(address, SERVICE) is HealthStatus.SERVING
        assert await check(address, "outrider.v1.Nobody") is HealthStatus.UNKNOWN_SERVICE
        await health.shut_down()
        await health.set_serving(True)
        assert await check(address, SERVICE) is HealthStatus.NOT_SERVING


async def test_health_before_anything_was_said_is_not_serving() -> None:
    async with serving(lambda _: None, health=await Health.of(SERVICE)) as address:
        assert await check(address) is HealthStatus.NOT_SERVING
        assert await check(address, SERVICE) is HealthStatus.NOT_SERVING


def test_metrics_are_served_while_the_context_lives() -> None:
    registry = CollectorRegistry()
    Counter("outrider_things", "Things.", registry=registry).inc(3)
    with exposition(registry, "127.0.0.1:0") as address:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            assert b"outrider_things_total 3.0" in response.read()
        with pytest.raises(CannotListen, match="metrics"), exposition(registry, str(address)):
            pass
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


def test_metrics_can_be_off() -> None:
    with exposition(CollectorRegistry(), "") as address:
        assert address is None
