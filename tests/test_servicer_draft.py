import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.v1 import draft_pb2_grpc, info_pb2, verifier_pb2_grpc
from outrider.v1 import generate_pb2 as pb

from draft_service.link_client import LinkState
from draft_service.servicer import DraftServicer
from shared.errors import InvalidRequest, Overloaded, Unavailable
from shared.rpc.channel import open_channel
from shared.rpc.status import from_rpc_error
from tests.support.rpc import serving

ATTACHED = LinkState(True)
Behaviour = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]


class _Verifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Remembers what it was asked and behaves as it is told."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        self.remaining: float | None = None
        self.left = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        try:
            async for response in self._behave(request, context):
                yield response
        finally:
            self.left.set()

    async def GetInfo(self, request: info_pb2.GetInfoRequest, context: Any) -> info_pb2.GetInfoResponse:  # noqa: N802
        del request, context
        return info_pb2.GetInfoResponse(version="verifier's", model=info_pb2.ModelInfo(name="target"))


async def _one_token(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    del request
    await context.send_initial_metadata((("x-first", "1"),))
    yield pb.GenerateResponse(output=pb.Output(text="hi", token_ids=[5]))
    context.set_trailing_metadata((("x-last", "2"),))


async def _endless(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    del request, context
    yield pb.GenerateResponse(output=pb.Output(token_ids=[5]))
    await asyncio.Event().wait()


def _failing(error: Exception) -> Behaviour:
    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        del request, context
        yield pb.GenerateResponse(output=pb.Output(token_ids=[5]))
        raise error

    return behave


@asynccontextmanager
async def _edge(verifier_address: str, state: LinkState = ATTACHED) -> AsyncIterator[Any]:
    async with open_channel(verifier_address) as to_verifier:
        servicer = DraftServicer(to_verifier, "instance-1", "edge", "ngram", "there:1", lambda: state)
        async with (
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)) as address,
            open_channel(address) as channel,
        ):
            yield draft_pb2_grpc.DraftServiceStub(channel)


@asynccontextmanager
async def _doors(behave: Behaviour) -> AsyncIterator[tuple[Any, _Verifier]]:
    verifier = _Verifier(behave)
    async with (
        serving(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)) as address,
        _edge(address) as stub,
    ):
        yield stub, verifier


@asynccontextmanager
async def _dead_address() -> AsyncIterator[str]:
    async with serving(lambda _: None) as address:
        pass
    yield address


async def test_a_call_goes_through_with_metadata_deadline_and_trailers() -> None:
    async with _doors(_one_token) as (stub, verifier):
        call = stub.Generate(pb.GenerateRequest(text="x", request_id="r-1"), timeout=30, metadata=(("x-tenant", "me"), ("x-bytes-bin", b"\x00\xff")))
        responses = [response async for response in call]
        assert [response.output.text for response in responses] == ["hi"]
        assert dict(await call.initial_metadata())["x-first"] == "1"
        assert dict(await call.trailing_metadata())["x-last"] == "2"
    assert (verifier.metadata["x-tenant"], verifier.metadata["x-bytes-bin"], verifier.metadata["x-request-id"]) == ("me", b"\x00\xff", "r-1")
    assert verifier.remaining is not None
    assert 0 < verifier.remaining < 60  # without a deadline it is None
    (request,) = verifier.requests
    assert request == pb.GenerateRequest(text="x", request_id="r-1", speculation=pb.Speculation(preferred_drafter="instance-1"))


async def test_a_call_without_deadline_goes_on_without_one() -> None:
    async with _doors(_one_token) as (stub, verifier):
        async for _ in stub.Generate(pb.GenerateRequest(text="x")):
            pass
    assert verifier.remaining is None
    assert verifier.metadata["x-request-id"]


async def test_a_drafter_that_the_client_names_is_kept() -> None:
    async with _doors(_one_token) as (stub, verifier):
        async for _ in stub.Generate(pb.GenerateRequest(text="x", speculation=pb.Speculation(preferred_drafter="another", max_draft_tokens=0))):
            pass
    assert verifier.requests[0].speculation == pb.Speculation(preferred_drafter="another", max_draft_tokens=0)


@pytest.mark.parametrize(
    "error", [InvalidRequest("sampling.top_p", "must be in (0, 1]"), Overloaded("full", 0.25), Unavailable("DRAINING", "shutting down", 2.0)]
)
async def test_the_verifiers_status_comes_through_unchanged(error: InvalidRequest | Overloaded | Unavailable) -> None:
    async with _doors(_failing(error)) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(pb.GenerateRequest(text="x", request_id="r-1")):
                pass
    known = from_rpc_error(failure.value)
    assert type(known) is type(error)
    assert (str(known), getattr(known, "reason", ""), getattr(known, "request_id", "")) == (str(error), error.reason, "r-1")


async def test_cancelling_reaches_the_verifier() -> None:
    async with _doors(_endless) as (stub, verifier):
        call = stub.Generate(pb.GenerateRequest(text="x"))
        await call.read()
        call.cancel()
        await verifier.left.wait()


async def test_the_deadline_reaches_the_client_as_itself() -> None:
    async with _doors(_endless) as (stub, verifier):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(pb.GenerateRequest(text="x"), timeout=0.3):
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await verifier.left.wait()


async def test_without_a_verifier_the_answer_is_unavailable_and_never_text() -> None:
    async with _dead_address() as address, _edge(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(pb.GenerateRequest(text="x")):
                pass
    known = from_rpc_error(failure.value)
    assert isinstance(known, Unavailable)
    assert (known.reason, known.retry_after_s) == ("VERIFIER_UNREACHABLE", 1.0)


async def test_a_verifier_that_dies_in_the_middle_is_out_of_reach() -> None:
    verifier = _Verifier(_endless)
    async with AsyncExitStack() as verifier_life:
        address = await verifier_life.enter_async_context(
            serving(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server))
        )
        async with _edge(address) as stub:
            call = stub.Generate(pb.GenerateRequest(text="x"))
            await call.read()
            await verifier_life.aclose()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
    known = from_rpc_error(failure.value)
    assert isinstance(known, Unavailable)
    assert known.reason == "VERIFIER_UNREACHABLE"


async def test_info_is_the_verifiers_and_its_own() -> None:
    async with _doors(_one_token) as (stub, _):
        answer = await stub.GetInfo(info_pb2.GetInfoRequest())
    assert (answer.version, answer.model.name) == ("verifier's", "target")
    own = answer.draft_service
    assert (own.instance_id, own.name, own.proposer, own.link_address, own.attached) == ("instance-1", "edge", "ngram", "there:1", True)


async def test_without_a_verifier_info_is_its_own_with_the_reason() -> None:
    state = LinkState(False, "its tokenizer is not the target's", "refused")
    async with _dead_address() as address, _edge(address, state) as stub:
        answer = await stub.GetInfo(info_pb2.GetInfoRequest())
    assert not answer.HasField("model")
    assert answer.version
    assert (answer.draft_service.attached, answer.draft_service.detached_reason) == (False, "its tokenizer is not the target's")
