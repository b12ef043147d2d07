"""`VerifierService` over gRPC: requests in, streams of tokens and text out. It knows the engine only as something that opens requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import grpc
from outrider.v1 import generate_pb2, info_pb2, verifier_pb2, verifier_pb2_grpc

from shared.errors import InvalidRequest, OutriderError
from shared.link import PROTOCOL_REVISION
from shared.rpc.convert_generate import MODE_TO_PROTO, Completion, Message, parse_request
from shared.rpc.interceptors import current_call
from shared.rpc.server import add_to_running
from shared.tokenizer import Tokenizer
from verifier_service.admission import build_request
from verifier_service.completion import GrowingCompletion, Growth
from verifier_service.info import VerifierInfo
from verifier_service.ledger import RequestLedger, RequestObserver, Usage
from verifier_service.request import Emission, FinishReason, Request
from verifier_service.text import TextStream

# The file that declares the service has to be loaded for reflection to know it.
SERVICE_NAME = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
_INLINE_SIZE = 2000  # more characters, or tokens, are converted on a thread: the event loop serves the others meanwhile

_Converted = TypeVar("_Converted")

_REASON_TO_PROTO = {
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: generate_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: generate_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generate_pb2.FINISH_REASON_STOP_STRING,
}


class Completions(Protocol):
    """What computes completions."""

    def open(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Emission]]:
        """A request for as long as the context lives. Raises Overloaded, Unavailable, InvalidRequest."""
        ...


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The target model's door. Calls must come through `shared.rpc.interceptors.CallInterceptor`.

    Args:
        completions: the engine.
        tokenizer: the target's.
        eos_ids: the target's end-of-sequence ids.
        describe: what GetInfo tells now; its limits are those that requests are held to.
        observer: is told what requests take.
        draw_seed: a random uint64.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        completions: Completions,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        describe: Callable[[], VerifierInfo],
        observer: RequestObserver,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._completions = completions
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._describe = describe
        self._limits = describe().limits
        self._observer = observer
        self._draw_seed = draw_seed
        self._clock = clock

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Take this service's calls on a server that runs already."""
        add_to_running(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, self, server)

    async def Generate(  # noqa: N802  # the name is the proto's
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """One completion; see verifier.proto."""
        call = current_call()
        ledger = RequestLedger(self._observer, self._clock, 0)
        try:
            asked = parse_request(request, self._limits)
            if asked.request_id is not None:
                call.rename(asked.request_id)
            prompt_ids = await self._tokenise(asked)
            admitted = build_request(asked, prompt_ids, self._limits, self._eos_ids, call.request_id, self._draw_seed())
            ledger.usage.prompt_tokens, ledger.usage.generated_tokens = len(prompt_ids), len(admitted.resume_ids)
            text = await self._text_after(admitted, asked.stop_strings)
            completion = GrowingCompletion(text, ledger)
            async with self._completions.open(admitted) as emissions:
                yield _started(admitted)
                async for emission in emissions:
                    if emission.error is not None:
                        raise emission.error
                    growth = completion.grow(emission)
                    if growth.token_ids or growth.text:
                        yield _output(growth)
                    if growth.finish is not None:
                        yield _finished(growth, growth.finish, ledger.usage)
                        return
        except OutriderError as error:
            ledger.fail(error.reason)
            raise
        except Exception:
            ledger.fail("INTERNAL")
            raise
        finally:
            # Whatever has not ended until now was ended from outside: a cancelled call, a deadline, a reader that does not read.
            remaining = context.time_remaining()
            ledger.fail("DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED")
            call.fields.update(asdict(ledger.usage))

    async def GetInfo(  # noqa: N802  # the name is the proto's
        self, request: info_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> info_pb2.GetInfoResponse:
        """What this service runs and takes."""
        del request, context
        return _info(self._describe())

    async def _tokenise(self, asked: Completion) -> list[int]:
        prompt = asked.prompt
        if isinstance(prompt, str):
            return await self._off_the_loop(self._tokenizer.encode, prompt, len(prompt))
        messages = [part for part in prompt if isinstance(part, Message)]
        if not messages:
            return [part for part in prompt if isinstance(part, int)]
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return await self._off_the_loop(self._tokenizer.render_chat, conversation, sum(len(message.content) for message in messages))

    async def _off_the_loop(self, convert: Callable[[Any], _Converted], value: object, size: int) -> _Converted:
        return convert(value) if size <= _INLINE_SIZE else await asyncio.to_thread(convert, value)

    async def _text_after(self, request: Request, stop_strings: Sequence[str]) -> TextStream:
        """A stream of text at the end of the prompt and of the resumed tokens, whose text was sent by the broken call."""
        text = TextStream(self._tokenizer, stop_strings, request.prompt_ids)
        delta = await self._off_the_loop(text.push, request.resume_ids, len(request.resume_ids))
        if delta.matched_stop is not None:
            raise InvalidRequest("resume_token_ids", "have a stop string: there is nothing to resume")
        return text


def _started(request: Request) -> generate_pb2.GenerateResponse:
    started = generate_pb2.Started(request_id=request.request_id, prompt_token_ids=request.prompt_ids, seed=request.seed)
    return generate_pb2.GenerateResponse(started=started)


def _output(growth: Growth) -> generate_pb2.GenerateResponse:
    output = generate_pb2.Output(text=growth.text, token_ids=growth.token_ids, accepted=growth.accepted)
    return generate_pb2.GenerateResponse(output=output)


def _finished(growth: Growth, reason: FinishReason, usage: Usage) -> generate_pb2.GenerateResponse:
    finished = generate_pb2.Finished(
        reason=_REASON_TO_PROTO[reason],
        usage=generate_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            rounds=usage.rounds,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
        ),
    )
    if isinstance(growth.matched, str):
        finished.stop = growth.matched
    elif growth.matched is not None:
        finished.stop_token_id = growth.matched
    return generate_pb2.GenerateResponse(finished=finished)


def _info(info: VerifierInfo) -> info_pb2.GetInfoResponse:
    limits = info.limits
    return info_pb2.GetInfoResponse(
        version=version("outrider"),
        protocol_revision=PROTOCOL_REVISION,
        model=info_pb2.ModelInfo(
            name=info.model.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            tokenizer_fingerprint=info.model.tokenizer_fingerprint,
            dtype=info.model.dtype,
            device=info.model.device,
        ),
        limits=info_pb2.Limits(
            max_prompt_bytes=limits.max_prompt_bytes,
            max_draft_tokens=limits.max_draft_tokens,
            max_stop_strings=limits.max_stop_strings,
            max_stop_string_chars=limits.max_stop_string_chars,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_logit_bias=limits.max_logit_bias,
        ),
        modes=[MODE_TO_PROTO[mode] for mode in limits.modes],
        drafters=[
            info_pb2.DrafterInfo(
                instance_id=drafter.instance_id,
                name=drafter.name,
                capacity=drafter.capacity,
                sequences=drafter.sequences,
                suspended=drafter.suspended,
            )
            for drafter in info.drafters
        ],
        refused_drafters=[
            info_pb2.RefusedDrafter(instance_id=refused.instance_id, name=refused.name, reason=refused.reason) for refused in info.refused
        ],
    )
