"""What happens around every call of a server: its id, its line in the log, and errors that become statuses.

One interceptor does all of it, so that the order is fixed: id, guards, handler, status, log line. It knows no message types.
"""

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager, closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from shared.errors import ProtocolViolation, Unavailable
from shared.rpc.convert_generate import is_request_id
from shared.rpc.patience import Patience
from shared.rpc.status import status_code, to_grpc_status

_log = structlog.stdlib.get_logger(__name__)

_OURS = "/outrider.v1."
_KIND = {True: "stream", False: "unary"}

Metadata = Mapping[str, str | bytes]
# Given the method's full name and the call's metadata; the handler runs inside the context, or it raises and the call is refused.
Guard = Callable[[str, Metadata], AbstractContextManager[None]]
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # generic in its stub only; None: there is no such method


@dataclass(slots=True)
class CallRecord:
    """What is logged about a call.

    Args:
        request_id: name of the call in logs and errors.
        fields: numbers and names that the servicer adds to the log line; never text of a prompt or a completion.
    """

    request_id: str
    fields: dict[str, int | float | str] = field(default_factory=dict)

    def rename(self, request_id: str) -> None:
        """The request itself brings an id: it replaces the one of the metadata."""
        self.request_id = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)


_current_call: ContextVar[CallRecord] = ContextVar("outrider_call")


def current_call() -> CallRecord:
    """The record of the call that is being handled."""
    return _current_call.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Around every call.

    Args:
        guards: asked in order before the handler runs.
        write_timeout_s: a response stream whose reader takes no message for this long is ended, so that nobody can hold memory by not reading.
        clock: monotonic seconds.
        observe: told the method, the status and the seconds of each call that has ended.
    """

    def __init__(
        self,
        guards: Sequence[Guard] = (),
        write_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[str, grpc.StatusCode, float], None] = lambda _method, _code, _seconds: None,
    ) -> None:
        self._guards = guards
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._observe = observe

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler of one call."""
        handler = await continuation(details)
        method = str(details.method)
        metadata: dict[str, str | bytes] = dict(details.invocation_metadata or ())
        if handler is None:
            # A service that is still loading has no handlers yet: its guard says so.
            return grpc.unary_unary_rpc_method_handler(self._refusing(method, metadata)) if method.startswith(_OURS) else None
        kinds = [_KIND[bool(handler.request_streaming)], _KIND[bool(handler.response_streaming)]]
        behaviour: Callable[..., Any] = getattr(handler, "_".join(kinds))
        parse = _checked(handler.request_deserializer)
        if handler.response_streaming:

            async def serve_stream(request: Any, context: Context) -> None:
                async with self._call(method, metadata, context):
                    await self._send(behaviour(request if handler.request_streaming else parse(request), context), context)

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(serve_stream, parse, handler.response_serializer)
            # Parsed inside: gRPC would tell the client the text of a parse error.
            return grpc.unary_stream_rpc_method_handler(serve_stream, None, handler.response_serializer)

        async def serve_one(request: Any, context: Context) -> Any:
            async with self._call(method, metadata, context):
                response = behaviour(request if handler.request_streaming else parse(request), context)
                return await response if inspect.isawaitable(response) else response

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(serve_one, parse, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(serve_one, None, handler.response_serializer)

    async def _send(self, responses: AsyncGenerator[Any, None] | Awaitable[None], context: Context) -> None:
        """Write a handler's responses; its `finally` has run when this returns or raises, however the call ends."""
        if inspect.isawaitable(responses):  # a handler that writes by itself
            await responses
            return
        with closing(Patience(self._write_timeout_s)) as patience:
            async with aclosing(responses) as stream:
                async for response in stream:
                    try:
                        with patience:
                            await context.write(response)
                    except TimeoutError:
                        raise Unavailable("SLOW_READER", f"no message was taken for {self._write_timeout_s:g} seconds") from None

    @asynccontextmanager
    async def _call(self, method: str, metadata: Metadata, context: Context) -> AsyncIterator[None]:
        started = self._clock()
        record = CallRecord(_request_id(metadata))
        _current_call.set(record)  # each call is a task of its own, so nothing has to be set back
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        code = grpc.StatusCode.OK
        try:
            with ExitStack() as guards:
                for guard in self._guards:
                    guards.enter_context(guard(method, metadata))
                yield
        except grpc.aio.AbortError:  # the handler has sent its status itself
            code = _as_code(context.code())
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):  # cancelled, past its deadline, or the peer is gone: nobody to tell
            remaining = context.time_remaining()
            code = grpc.StatusCode.DEADLINE_EXCEEDED if remaining is not None and remaining <= 0 else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            code = status_code(error)
            if code is grpc.StatusCode.INTERNAL:
                _log.exception("call failed", method=method)
            await context.abort_with_status(to_grpc_status(error, record.request_id))
        finally:
            seconds = self._clock() - started
            self._observe(method, code, seconds)
            level = "info" if method.startswith(_OURS) else "debug"
            getattr(_log, level)("call", method=method, code=code.name, peer=context.peer(), duration_s=round(seconds, 6), **record.fields)

    def _refusing(self, method: str, metadata: Metadata) -> Callable[[bytes, Context], Awaitable[None]]:
        async def refuse(_: bytes, context: Context) -> None:
            async with self._call(method, metadata, context):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")

        return refuse


def _checked(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(raw: bytes) -> Any:
        try:
            return raw if deserialize is None else deserialize(raw)
        except DecodeError:
            raise ProtocolViolation("the bytes of a request are no message of its type") from None

    return parse


def _request_id(metadata: Metadata) -> str:
    given = metadata.get("x-request-id", "")
    return given if isinstance(given, str) and is_request_id(given) else uuid.uuid4().hex


def _as_code(code: object) -> grpc.StatusCode:
    """`ServicerContext.code` gives an enum or its number."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((member for member in grpc.StatusCode if member.value[0] == code), grpc.StatusCode.UNKNOWN)
