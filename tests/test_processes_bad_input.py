"""Bad input through a real verifier and a real link: the right status, a stable reason, the field; and the engine serves the next request."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from outrider.v1 import generate_pb2, link_pb2, verifier_pb2_grpc

from client import Client
from shared.rpc.status import DOMAIN, read_status
from tests.support.model_dir import MAX_MODEL_LEN, ModelDirs, save_models
from tests.support.processes import DEADLINE_S, Services, VerifierProcess, scrape, until

VERIFIER = "outrider.v1.VerifierService"
TOKEN = "open sesame"
MAX_PROMPT_BYTES = 10_000
PROMPT = generate_pb2.TokenIds(ids=[5, 6, 7])

Arguments = dict[str, Any]
Stub = Any  # its type knows the synchronous calls only


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(autouse=True)
def logs(services: Services) -> Iterator[None]:
    yield
    services.show()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("link") / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def verifier(services: Services, models: ModelDirs, token_file: Path) -> VerifierProcess:
    return services.launch_verifier(models.target, "--link-token-file", str(token_file), "--max-prompt-bytes", str(MAX_PROMPT_BYTES)).serving()


@pytest.fixture
async def stub(verifier: VerifierProcess) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


async def assert_serves(address: str) -> None:
    async with Client(address) as client:
        completion = await client.complete([5, 6, 7], max_tokens=3, ignore_eos=True, deadline_s=DEADLINE_S)
    assert len(completion.token_ids) == 3


def details_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and field; the request id is there, and nothing of our own code."""
    status = read_status(error)
    assert status is not None, error
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if not detail.Unpack(info):
            detail.Unpack(bad_request)
    assert info.domain == DOMAIN
    assert info.metadata["request_id"]
    assert "Traceback" not in str(error.details())
    fields = [violation.field for violation in bad_request.field_violations]
    return error.code(), info.reason, fields[0] if fields else ""


def sampled(**sampling: Any) -> Arguments:
    return {"token_ids": PROMPT, "sampling": generate_pb2.Sampling(**sampling)}


def stopped(**stopping: Any) -> Arguments:
    return {"token_ids": PROMPT, "stopping": generate_pb2.Stopping(**stopping)}


def ids(*token_ids: int) -> Arguments:
    return {"token_ids": generate_pb2.TokenIds(ids=token_ids)}


BAD_REQUESTS: list[tuple[str, Arguments, str]] = [
    ("no prompt", {}, "prompt"),
    ("empty text", {"text": ""}, "text"),
    ("no tokens", ids(), "token_ids.ids"),
    ("no messages", {"chat": generate_pb2.ChatMessages()}, "chat.messages"),
    (
        "messages that the template refuses",
        {"chat": generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="nobody", content="hi")])},
        "chat.messages",
    ),
    ("more bytes than allowed", {"text": "x" * (MAX_PROMPT_BYTES + 1)}, "text"),
    ("more tokens than fit the model", {"text": "~" * (MAX_MODEL_LEN + 1)}, "prompt"),
    ("more token ids than fit the model", ids(*[5] * MAX_MODEL_LEN), "token_ids.ids"),
    ("a token id out of range", ids(5, 100_000), "token_ids.ids[1]"),
    ("a token id that only the embedding has", ids(300), "token_ids.ids[0]"),
    ("temperature -1", sampled(temperature=-1), "sampling.temperature"),
    ("temperature NaN", sampled(temperature=math.nan), "sampling.temperature"),
    ("temperature infinite", sampled(temperature=math.inf), "sampling.temperature"),
    ("top_p 0", sampled(top_p=0), "sampling.top_p"),
    ("top_p above 1", sampled(top_p=1.5), "sampling.top_p"),
    ("min_p -1", sampled(min_p=-1), "sampling.min_p"),
    ("repetition_penalty 0", sampled(repetition_penalty=0), "sampling.repetition_penalty"),
    ("presence_penalty 3", sampled(presence_penalty=3), "sampling.presence_penalty"),
    ("frequency_penalty NaN", sampled(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    ("a bias NaN", sampled(logit_bias={5: math.nan}), "sampling.logit_bias"),
    ("max_tokens 0", stopped(max_tokens=0), "stopping.max_tokens"),
    ("min_tokens above max_tokens", stopped(max_tokens=3, min_tokens=4), "stopping.min_tokens"),
    ("an empty stop string", stopped(stop=[""]), "stopping.stop[0]"),
    ("17 stop strings", stopped(stop=["x"] * 17), "stopping.stop"),
    ("a stop token out of range", stopped(stop_token_ids=[100_000]), "stopping.stop_token_ids[0]"),
    ("an unknown mode", {"token_ids": PROMPT, "mode": 77}, "mode"),
    (
        "more draft tokens than allowed",
        {"token_ids": PROMPT, "speculation": generate_pb2.Speculation(max_draft_tokens=17)},
        "speculation.max_draft_tokens",
    ),
    ("a strange request id", {"token_ids": PROMPT, "request_id": "no spaces"}, "request_id"),
    ("a resumed token out of range", {"token_ids": PROMPT, "resume_token_ids": [100_000]}, "resume_token_ids[0]"),
]


@pytest.mark.parametrize(("arguments", "field"), [case[1:] for case in BAD_REQUESTS], ids=[case[0] for case in BAD_REQUESTS])
async def test_a_bad_request_is_refused_by_its_field(arguments: Arguments, field: str, stub: Stub, verifier: VerifierProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(generate_pb2.GenerateRequest(**arguments), timeout=DEADLINE_S).read()
    assert details_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", field)
    await assert_serves(verifier.address)


async def test_bytes_that_are_no_message_are_refused(verifier: VerifierProcess) -> None:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        generate: Any = channel.unary_stream(f"/{VERIFIER}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(b"\xff\xff\xff", timeout=DEADLINE_S).read()
    assert details_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", "")
    await assert_serves(verifier.address)


async def test_a_message_of_5_mb_is_refused_by_grpc_itself(stub: Stub, verifier: VerifierProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(generate_pb2.GenerateRequest(text="x" * (5 << 20)), timeout=DEADLINE_S).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert read_status(caught.value) is None
    await assert_serves(verifier.address)


async def test_a_running_requests_id_is_not_taken_twice(stub: Stub, verifier: VerifierProcess) -> None:
    request = generate_pb2.GenerateRequest(token_ids=PROMPT, request_id="mine", stopping=generate_pb2.Stopping(max_tokens=4000, ignore_eos=True))
    first = stub.Generate(request)
    assert (await first.read()).started.request_id == "mine"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, timeout=DEADLINE_S).read()
    assert details_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "request_id")
    first.cancel()
    await assert_serves(verifier.address)


# -- the link

SpeculateCall = Any  # its stub says `object` of what is read


def hello(**changes: Any) -> bytes:
    fields: Arguments = {
        "protocol_revision": 1,
        "instance_id": "stranger",
        "name": "stranger",
        "modes": [generate_pb2.VERIFICATION_MODE_COUPLED],
        "capacity": 4,
    }
    return frame(hello=link_pb2.Hello(**fields | changes))


def frame(**arm: Any) -> bytes:
    return link_pb2.SpeculateRequest(**arm).SerializeToString()


def proposal(*token_ids: int, num_distributions: int = 0) -> bytes:
    made = link_pb2.Proposal(sequence=1, token_ids=token_ids, distributions=[link_pb2.Distribution()] * num_distributions)
    return frame(proposals=link_pb2.ProposalBatch(proposals=[made]))


def from_the_future() -> bytes:
    """Field 100 with the number 1: an arm of the oneof that this version does not know."""
    return b"\xa0\x06\x01"


async def attach(channel: grpc.aio.Channel, *frames: bytes, token: str = TOKEN) -> SpeculateCall:
    """An open call on which these have been sent."""
    call: SpeculateCall = channel.stream_stream(
        f"/{link_pb2.DESCRIPTOR.package}.LinkService/Speculate", response_deserializer=link_pb2.SpeculateResponse.FromString
    )(metadata=(("authorization", f"Bearer {token}"),) if token else ())
    for each in frames:
        await call.write(each)
    return call


async def end_of(call: SpeculateCall) -> grpc.aio.AioRpcError:
    """Reads to the end, which is an error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value


async def read_all(call: SpeculateCall) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await call.read() is not grpc.aio.EOF:
            pass


BAD_OPENINGS: list[tuple[str, Sequence[bytes], grpc.StatusCode, str]] = [
    ("an empty frame", (frame(),), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("an unknown frame", (from_the_future(),), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("bytes that are no frame", (b"\xff\xff",), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("guesses before hello", (proposal(1),), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("a heartbeat before hello", (frame(heartbeat=link_pb2.Heartbeat(sent_ns=1)),), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("a second hello", (hello(), hello()), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("a hello without a name", (hello(name=""),), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ("another tokenizer", (hello(tokenizer_fingerprint="0" * 64),), grpc.StatusCode.FAILED_PRECONDITION, "HANDSHAKE_REFUSED"),
    ("another revision", (hello(protocol_revision=2),), grpc.StatusCode.FAILED_PRECONDITION, "HANDSHAKE_REFUSED"),
    ("16 empty frames", (hello(), *[frame()] * 16), grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
]


@pytest.mark.parametrize(("frames", "code", "reason"), [case[1:] for case in BAD_OPENINGS], ids=[case[0] for case in BAD_OPENINGS])
async def test_a_link_that_breaks_the_rules_is_ended_with_the_reason(
    frames: Sequence[bytes], code: grpc.StatusCode, reason: str, verifier: VerifierProcess
) -> None:
    async with grpc.aio.insecure_channel(verifier.link) as channel:
        call = await attach(channel, *frames)
        assert details_of(await end_of(call)) == (code, reason, "")
    await assert_serves(verifier.address)


@pytest.mark.parametrize("token", ["", "open sesam", "open sesamee"])
async def test_a_link_without_the_token_is_refused(token: str, verifier: VerifierProcess) -> None:
    async with grpc.aio.insecure_channel(verifier.link) as channel:
        call = await attach(channel, token=token)
        assert details_of(await end_of(call)) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "")
    await assert_serves(verifier.address)


async def test_a_refused_drafter_is_told_by_get_info(verifier: VerifierProcess) -> None:
    async with grpc.aio.insecure_channel(verifier.link) as channel, Client(verifier.address) as client:
        await end_of(await attach(channel, hello(instance_id="foreign", name="of-another-model", tokenizer_fingerprint="0" * 64)))
        refused = (await client.info()).refused_drafters[-1]
    assert (refused.instance_id, refused.name) == ("foreign", "of-another-model")
    assert "tokenizer" in refused.reason


BAD_FRAMES: list[tuple[str, bytes, str]] = [
    ("an empty frame", frame(), "bad_frame"),
    ("an unknown frame", from_the_future(), "bad_frame"),
    ("too many guesses", proposal(*range(65)), "too_long"),
    ("no guesses", proposal(), "bad_shape"),
    ("fewer distributions than guesses", proposal(1, 2, num_distributions=1), "bad_shape"),
    ("a distribution over nothing", proposal(1, num_distributions=1), "bad_probability"),
]


@pytest.mark.parametrize(("bad", "reason"), [case[1:] for case in BAD_FRAMES], ids=[case[0] for case in BAD_FRAMES])
async def test_a_malformed_frame_is_counted_and_the_link_goes_on(bad: bytes, reason: str, verifier: VerifierProcess) -> None:
    before = await scrape(verifier.metrics)
    async with grpc.aio.insecure_channel(verifier.link) as channel:
        call = await attach(channel, hello(), bad)
        assert (await call.read()).WhichOneof("frame") == "welcome"

        async def counted() -> bool:
            return (await scrape(verifier.metrics))("rejected_proposals_total", reason=reason) > before("rejected_proposals_total", reason=reason)

        await until(counted, f"{reason} is counted")
        await call.write(frame(heartbeat=link_pb2.Heartbeat(sent_ns=77)))
        assert await answer_to(call, 77)
        await assert_serves(verifier.address)  # with this drafter attached, which never answers
        await call.write(frame(goodbye=link_pb2.Goodbye(reason="done")))
        await call.done_writing()
        await read_all(call)
        assert await call.code() is grpc.StatusCode.OK


async def answer_to(call: SpeculateCall, sent_ns: int) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            message = await call.read()
            if message.heartbeat.reply and message.heartbeat.sent_ns == sent_ns:
                return True
