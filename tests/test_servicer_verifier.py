import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from outrider.v1 import generate_pb2 as pb
from outrider.v1 import info_pb2, verifier_pb2_grpc

from shared.errors import CorruptOutput, EngineFailure, InvalidRequest, OutriderError, Overloaded, Unavailable
from shared.rpc.convert_generate import Limits
from shared.rpc.status import from_rpc_error, read_status
from shared.sampling import Mode
from shared.tokenizer import Tokenizer
from tests.support.rpc import NullObserver, ScriptedCompletions, connected, emissions, endless
from tests.support.tiny_tokenizers import byte_level_backend, pretrained
from verifier_service.info import DrafterInfo, ModelInfo, RefusedDrafter, VerifierInfo
from verifier_service.request import Emission, FinishReason, Request
from verifier_service.servicer import VerifierServicer

TOKENIZER = Tokenizer(pretrained(byte_level_backend()))
LIMITS = Limits(vocab_size=TOKENIZER.vocab_size, max_model_len=200, max_prompt_bytes=1000)
INFO = VerifierInfo(
    ModelInfo("tiny", TOKENIZER.fingerprint, "float64", "cpu"),
    LIMITS,
    (DrafterInfo("i1", "edge", 4, 2, True),),
    (RefusedDrafter("i2", "other", "its tokenizer is another"),),
)


class _Door:
    """A verifier with a scripted engine, and its stub."""

    def __init__(self, play: Callable[[Request], AsyncIterator[Emission]]) -> None:
        self.completions = ScriptedCompletions(play)
        self.observer = NullObserver()
        self.servicer = VerifierServicer(self.completions, TOKENIZER, frozenset({1}), lambda: INFO, self.observer, lambda: 42)
        self.stub: Any = None

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> tuple[str, list[int], pb.Started, pb.Finished]:
        """Text, ids, first and last frame of a completion; checks their order."""
        frames = [frame async for frame in self.stub.Generate(request, **options)]
        assert [frame.WhichOneof("frame") for frame in frames] == ["started", *["output"] * (len(frames) - 2), "finished"]
        outputs = [frame.output for frame in frames[1:-1]]
        text = "".join(output.text for output in outputs)
        return text, [token_id for output in outputs for token_id in output.token_ids], frames[0].started, frames[-1].finished

    async def fail(self, request: pb.GenerateRequest, **options: Any) -> OutriderError:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await self.generate(request, **options)
        error = from_rpc_error(failure.value)
        assert isinstance(error, OutriderError)
        return error


@asynccontextmanager
async def _door(play: Callable[[Request], AsyncIterator[Emission]]) -> AsyncIterator[_Door]:
    door = _Door(play)
    async with connected(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(door.servicer, server)) as channel:
        door.stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        yield door


def _ids(text: str) -> list[int]:
    return [token_id for token_id in TOKENIZER.encode(text) if token_id != 0]


async def test_a_completion_streams_text_and_ids_and_ends_with_its_usage() -> None:
    runs = [_ids("hello"), _ids(" world"), _ids("ab")]
    async with _door(emissions(*runs)) as door:
        text, token_ids, started, finished = await door.generate(pb.GenerateRequest(text="stop the end", request_id="r-1"))
    assert text == "hello worldab"
    assert token_ids == [token_id for run in runs for token_id in run]
    assert list(started.prompt_token_ids) == TOKENIZER.encode("stop the end")
    assert (started.request_id, started.seed) == ("r-1", 42)
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == len(TOKENIZER.encode("stop the end"))
    assert finished.usage.generated_tokens == len(token_ids)
    drafted = sum(len(run) - 1 for run in runs)
    assert (finished.usage.drafted_tokens, finished.usage.accepted_tokens) == (drafted, drafted)
    assert finished.usage.rounds == sum(len(run) > 1 for run in runs)
    assert door.observer.finished == [FinishReason.LENGTH]


async def test_the_engine_gets_what_was_asked_for() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=pb.Sampling(temperature=0, seed=7),
        stopping=pb.Stopping(max_tokens=9, min_tokens=2, stop_token_ids=[8]),
        mode=pb.VERIFICATION_MODE_REJECTION,
        speculation=pb.Speculation(max_draft_tokens=3, preferred_drafter="edge"),
        resume_token_ids=[10, 11],
    )
    async with _door(emissions([20])) as door:
        _, token_ids, started, finished = await door.generate(request, metadata=(("x-request-id", "from-metadata"),))
    (opened,) = door.completions.opened
    assert (opened.request_id, opened.prompt_ids, opened.resume_ids, opened.seed) == ("from-metadata", (5, 6), (10, 11), 7)
    assert (opened.mode, opened.max_draft_tokens, opened.preferred_drafter) == (Mode.REJECTION, 3, "edge")
    assert (opened.stopping.max_tokens, opened.stopping.min_tokens, opened.stopping.stop_ids) == (9, 2, frozenset({8}))
    assert started.request_id == "from-metadata"
    assert token_ids == [20]
    assert finished.usage.generated_tokens == 3


async def test_messages_go_through_the_models_template() -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
    async with _door(emissions([20])) as door:
        _, _, started, _ = await door.generate(pb.GenerateRequest(chat=chat))
        refusal = await door.fail(pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="nobody", content="x")])))
    assert TOKENIZER.decode(list(started.prompt_token_ids)) == "[user]hello[assistant]"
    assert isinstance(refusal, InvalidRequest)
    assert refusal.field == "chat.messages"


async def test_a_stop_string_inside_a_round_ends_it_there() -> None:
    run = _ids("hello STOP world")
    stop_at = next(count for count in range(1, len(run) + 1) if "STOP" in TOKENIZER.decode(run[:count]))
    assert stop_at < len(run)
    async with _door(emissions(run, [20])) as door:
        text, token_ids, _, finished = await door.generate(pb.GenerateRequest(text="x", stopping=pb.Stopping(stop=["never", "STOP"])))
        assert await door.completions.closed.get()
    assert text == "hello "
    assert token_ids == run[:stop_at]
    assert (finished.reason, finished.stop) == (pb.FINISH_REASON_STOP_STRING, "STOP")
    usage = finished.usage
    assert (usage.generated_tokens, usage.rounds, usage.drafted_tokens, usage.accepted_tokens) == (stop_at, 1, stop_at, stop_at)
    assert door.observer.finished == [FinishReason.STOP_STRING]


async def test_a_stop_token_is_sent_as_an_id_and_not_as_text() -> None:
    async def play(request: Request) -> AsyncIterator[Emission]:
        yield Emission(request.request_id, tuple(_ids("ab")), finish=FinishReason.STOP_TOKEN, matched_id=_ids("ab")[-1])

    async with _door(play) as door:
        text, token_ids, _, finished = await door.generate(pb.GenerateRequest(text="x"))
    assert token_ids == _ids("ab")
    assert text == TOKENIZER.decode(_ids("ab")[:-1])
    assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP_TOKEN, _ids("ab")[-1])


async def test_text_that_might_have_become_a_stop_string_comes_with_the_end() -> None:
    async with _door(emissions(_ids("hello ST"))) as door:
        text, _, _, _ = await door.generate(pb.GenerateRequest(text="x", stopping=pb.Stopping(stop=["STOP"])))
    assert text == "hello ST"


async def test_cancelling_closes_the_request() -> None:
    async with _door(endless) as door:
        call = door.stub.Generate(pb.GenerateRequest(text="x", request_id="mine"))
        await call.read()
        await call.read()
        call.cancel()
        assert await door.completions.closed.get() == "mine"
    assert door.observer.failed == ["CANCELLED"]


async def test_a_deadline_closes_the_request() -> None:
    async with _door(endless) as door:
        call = door.stub.Generate(pb.GenerateRequest(text="x", request_id="mine"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await door.completions.closed.get() == "mine"


async def test_a_client_that_goes_away_closes_the_request() -> None:
    door = _Door(endless)
    async with connected(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(door.servicer, server)) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="x", request_id="mine"))
        await call.read()
        await channel.close()
        assert await door.completions.closed.get() == "mine"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailure("secret"), grpc.StatusCode.INTERNAL),
        (CorruptOutput("not finite"), grpc.StatusCode.DATA_LOSS),
        (Overloaded("no room", 3.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("ENGINE_STALLED", "stalled"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_what_the_engine_reports_ends_the_call_and_closes_the_request(error: OutriderError, code: grpc.StatusCode) -> None:
    async def play(request: Request) -> AsyncIterator[Emission]:
        yield Emission(request.request_id, (5,))
        yield Emission(request.request_id, error=error)

    async with _door(play) as door:
        call = door.stub.Generate(pb.GenerateRequest(text="x"))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await _drain(call)
        await door.completions.closed.get()
    assert failure.value.code() is code
    assert type(from_rpc_error(failure.value)) is type(error)
    assert "secret" not in str(failure.value)
    assert door.observer.failed == [error.reason]


BAD = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(text=""), "text"),
    (pb.GenerateRequest(text="x" * 1001), "text"),
    (pb.GenerateRequest(text="漢" * 100), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**6])), "token_ids.ids[0]"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=-1)), "sampling.temperature"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=0)), "sampling.top_p"),
    (pb.GenerateRequest(text="x", stopping=pb.Stopping(max_tokens=0)), "stopping.max_tokens"),
    (pb.GenerateRequest(text="x", mode=9), "mode"),  # type: ignore[arg-type]
    (pb.GenerateRequest(text="x", resume_token_ids=_ids("a STOP"), stopping=pb.Stopping(stop=["STOP"])), "resume_token_ids"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{field}-{index}" for index, (_, field) in enumerate(BAD)])
async def test_bad_input_is_answered_with_status_reason_and_field_and_the_next_request_is_served(request_: pb.GenerateRequest, field: str) -> None:
    async with _door(emissions(_ids("ab"))) as door:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await door.generate(request_)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status, info, bad_request = read_status(failure.value), error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status is not None
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad_request)
        assert (info.reason, bad_request.field_violations[0].field) == ("INVALID_REQUEST", field)
        assert not door.completions.opened
        text, _, _, _ = await door.generate(pb.GenerateRequest(text="x"))
        assert text == "ab"
    assert door.observer.failed == ["INVALID_REQUEST"]


async def test_a_message_of_5_mb_is_refused_by_grpc_itself() -> None:
    async with _door(emissions(_ids("ab"))) as door:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await door.generate(pb.GenerateRequest(text="x" * 5_000_000))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert read_status(failure.value) is None
        assert (await door.generate(pb.GenerateRequest(text="x")))[0] == "ab"


async def test_a_long_prompt_is_tokenised_like_a_short_one() -> None:
    servicer_limits = Limits(vocab_size=TOKENIZER.vocab_size, max_model_len=10_000, max_prompt_bytes=10_000)
    info = VerifierInfo(INFO.model, servicer_limits)
    completions = ScriptedCompletions(emissions(_ids("ab")))
    servicer = VerifierServicer(completions, TOKENIZER, frozenset(), lambda: info, NullObserver(), lambda: 1)
    async with connected(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        prompts = ["hello world " * 300, "hello"]
        await asyncio.gather(*(_drain(stub.Generate(pb.GenerateRequest(text=prompt))) for prompt in prompts))
    assert {request.prompt_ids for request in completions.opened} == {tuple(TOKENIZER.encode(prompt)) for prompt in prompts}


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def test_info_tells_model_limits_modes_and_drafters() -> None:
    async with _door(endless) as door:
        answer = await door.stub.GetInfo(info_pb2.GetInfoRequest())
    assert (answer.model.name, answer.model.max_model_len, answer.model.vocab_size) == ("tiny", 200, TOKENIZER.vocab_size)
    assert (answer.model.tokenizer_fingerprint, answer.model.dtype, answer.model.device) == (TOKENIZER.fingerprint, "float64", "cpu")
    assert answer.protocol_revision == 1
    assert answer.version
    assert (answer.limits.max_prompt_bytes, answer.limits.max_draft_tokens, answer.limits.max_stop_strings) == (1000, 8, 16)
    assert (answer.limits.max_stop_string_chars, answer.limits.max_stop_token_ids, answer.limits.max_logit_bias) == (256, 64, 1024)
    assert list(answer.modes) == [pb.VERIFICATION_MODE_COUPLED, pb.VERIFICATION_MODE_REJECTION]
    assert [(drafter.instance_id, drafter.name, drafter.capacity, drafter.sequences, drafter.suspended) for drafter in answer.drafters] == [
        ("i1", "edge", 4, 2, True)
    ]
    assert [(refused.name, refused.reason) for refused in answer.refused_drafters] == [("other", "its tokenizer is another")]
    assert not answer.HasField("draft_service")
