import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from outrider.v1 import generate_pb2, info_pb2, verifier_pb2_grpc

from shared.errors import InvalidRequest
from shared.rpc.channel import open_channel
from shared.rpc.guards import Gate, bearer_guard
from shared.rpc.health import Health
from shared.rpc.interceptors import current_call
from shared.rpc.status import read_status
from tests.support.rpc import connected, serving

GenerateBehaviour = Callable[[generate_pb2.GenerateRequest, Any], AsyncIterator[generate_pb2.GenerateResponse]]


class _Servicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Behaves as it is told."""

    def __init__(self, generate: GenerateBehaviour | None = None, info: Callable[[Any], Any] | None = None) -> None:
        self._generate = generate
        self._info = info

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:  # noqa: N802
        assert self._generate is not None
        async for response in self._generate(request, context):
            yield response

    async def GetInfo(self, request: info_pb2.GetInfoRequest, context: Any) -> info_pb2.GetInfoResponse:  # noqa: N802
        del request
        assert self._info is not None
        answer: info_pb2.GetInfoResponse = self._info(context)
        return answer


def _add(servicer: _Servicer) -> Callable[[grpc.aio.Server], object]:
    return lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)


def _raise(error: BaseException) -> Callable[[Any], Any]:
    def behave(_: Any) -> Any:
        raise error

    return behave


def _info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = read_status(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


async def test_our_errors_become_statuses_in_unary_calls() -> None:
    async with connected(_add(_Servicer(info=_raise(InvalidRequest("text", "is empty"))))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest())
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _info_of(failure.value).metadata["field"] == "text"


async def test_no_exception_text_gets_out_and_the_request_id_does() -> None:
    async def generate(request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        del request, context
        yield generate_pb2.GenerateResponse()
        raise ValueError("secret of the house")

    async with connected(_add(_Servicer(generate))) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(generate_pb2.GenerateRequest(), metadata=(("x-request-id", "req-9"),))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in f"{failure.value.details()}{failure.value.trailing_metadata()}"
    assert _info_of(failure.value).metadata["request_id"] == "req-9"


async def test_bytes_that_are_no_message_are_the_callers_fault_and_cite_nothing() -> None:
    async with connected(_add(_Servicer())) as channel:
        for path in ("Generate", "GetInfo"):
            send: Any = channel.unary_stream(f"/outrider.v1.VerifierService/{path}")
            call = send(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert _info_of(failure.value).reason == "PROTOCOL_VIOLATION"


async def test_a_handler_may_abort_by_itself() -> None:
    class Aborting(_Servicer):
        async def GetInfo(self, request: info_pb2.GetInfoRequest, context: Any) -> info_pb2.GetInfoResponse:  # noqa: N802
            del request
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "as I said", (("x-why", "because"),))
            raise AssertionError("abort returned")

    with structlog.testing.capture_logs() as lines:
        async with connected(_add(Aborting()), grace_s=10) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest())
    assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.ALREADY_EXISTS, "as I said")
    assert dict(failure.value.trailing_metadata())["x-why"] == "because"
    assert [line["code"] for line in lines if line["event"] == "call"] == ["ALREADY_EXISTS"]


@pytest.mark.parametrize(("given", "is_kept"), [("abc-1:2.3_X", True), ("with space", False), ("x" * 129, False), ("", False)])
async def test_a_request_id_is_taken_from_the_metadata_or_made(given: str, is_kept: bool) -> None:
    seen = []

    def info(context: Any) -> info_pb2.GetInfoResponse:
        del context
        seen.append((current_call().request_id, structlog.contextvars.get_contextvars()["request_id"]))
        current_call().fields["tokens"] = 3
        return info_pb2.GetInfoResponse()

    with structlog.testing.capture_logs() as lines:
        async with connected(_add(_Servicer(info=info)), grace_s=10) as channel:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest(), metadata=(("x-request-id", given),))
    ((request_id, bound),) = seen
    assert request_id == bound
    assert (request_id == given) is is_kept
    (line,) = [line for line in lines if line["event"] == "call"]
    assert (line["method"], line["code"], line["tokens"]) == ("/outrider.v1.VerifierService/GetInfo", "OK", 3)
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["duration_s"] >= 0


async def test_a_cancelled_stream_leaves_its_handler_at_once_and_is_logged_as_such() -> None:
    left = asyncio.Event()

    async def generate(request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        del request, context
        try:
            yield generate_pb2.GenerateResponse()
            await asyncio.Event().wait()
        finally:
            left.set()

    with structlog.testing.capture_logs() as lines:
        async with connected(_add(_Servicer(generate)), grace_s=10) as channel:
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(generate_pb2.GenerateRequest())
            await call.read()
            call.cancel()
            await left.wait()
    assert [line["code"] for line in lines if line["event"] == "call"] == ["CANCELLED"]


async def test_a_deadline_is_logged_as_such() -> None:
    async def generate(request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        del request, context
        yield generate_pb2.GenerateResponse()
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as lines:
        async with connected(_add(_Servicer(generate)), grace_s=10) as channel:
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(generate_pb2.GenerateRequest(), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                async for _ in call:
                    pass
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [line["code"] for line in lines if line["event"] == "call"] == ["DEADLINE_EXCEEDED"]


async def test_a_reader_that_does_not_read_is_left_and_its_handler_closed() -> None:
    left = asyncio.Event()

    async def generate(request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        del request, context
        try:
            while True:
                yield generate_pb2.GenerateResponse(output=generate_pb2.Output(text="x" * 100_000))
        finally:
            left.set()

    async with connected(_add(_Servicer(generate)), write_timeout_s=0.3) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(generate_pb2.GenerateRequest())
        await left.wait()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert _info_of(failure.value).reason == "SLOW_READER"


async def test_health_and_reflection_work_behind_the_interceptor() -> None:
    health = await Health.of("outrider.v1.VerifierService")
    async with (
        serving(_add(_Servicer()), health=health, services=["outrider.v1.VerifierService"]) as address,
        open_channel(address) as channel,
    ):
        unary: Any = health_pb2_grpc.HealthStub(channel)
        watch = unary.Watch(health_pb2.HealthCheckRequest(service="outrider.v1.VerifierService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        services = [service.name for service in (await call.read()).list_services_response.service]
        assert "outrider.v1.VerifierService" in services
        assert "grpc.health.v1.Health" in services
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await unary.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("metadata", "is_let_in"),
    [
        ((("authorization", "Bearer open sesame"),), True),
        ((("authorization", "Bearer open sesam"),), False),
        ((("authorization", "open sesame"),), False),
        ((("authorization", "Bearer "),), False),
        ((), False),
    ],
)
async def test_only_the_right_token_opens_the_guarded_service(metadata: tuple[tuple[str, str], ...], is_let_in: bool) -> None:
    guard = bearer_guard("outrider.v1.VerifierService", "open sesame")
    servicer = _Servicer(info=lambda _: info_pb2.GetInfoResponse(version="1"))
    async with connected(_add(servicer), guards=[guard]) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest(), metadata=metadata)
        if is_let_in:
            assert (await call).version == "1"
            return
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert _info_of(failure.value).reason == "UNAUTHENTICATED"


async def test_other_services_need_no_token() -> None:
    servicer = _Servicer(info=lambda _: info_pb2.GetInfoResponse(version="1"))
    async with connected(_add(servicer), guards=[bearer_guard("outrider.v1.LinkService", "t")]) as channel:
        assert (await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest())).version == "1"


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        bearer_guard("outrider.v1.LinkService", "")


async def test_while_loading_every_call_says_so_even_without_handlers() -> None:
    gate = Gate("verifier")
    async with connected(lambda _: None, guards=[gate]) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetInfo(info_pb2.GetInfoRequest())
        assert (failure.value.code(), _info_of(failure.value).reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Generate(generate_pb2.GenerateRequest()).read()
        assert _info_of(failure.value).reason == "LOADING"
        gate.open()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetInfo(info_pb2.GetInfoRequest())
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_handlers_may_be_added_while_the_server_runs() -> None:
    servers: list[grpc.aio.Server] = []
    async with connected(servers.append) as channel:
        _add(_Servicer(info=lambda _: info_pb2.GetInfoResponse(version="late")))(servers[0])
        assert (await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(info_pb2.GetInfoRequest())).version == "late"
