"""One completion on its way, as the client meets it: parts in order, then the whole. It knows nothing of addresses or channels."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, cast

import grpc
from outrider.v1 import generate_pb2

from client.completion import Completion, Part, Timings
from client.convert import to_ending, to_part
from shared.errors import OutriderError
from shared.rpc.status import from_rpc_error


class Generation:
    """A completion on its way: iterate for its parts, then read `result`. Closing or dropping it cancels the call.

    Args:
        start: sends the request.
        retry: whether an error means that the request never reached a service and `start` may be called again.
        clock: monotonic seconds.
    """

    def __init__(
        self, start: "Callable[[], grpc.aio.UnaryStreamCall[Any, Any]]", retry: Callable[[grpc.aio.AioRpcError], bool], clock: Callable[[], float]
    ) -> None:
        self.request_id = ""
        self.seed: int | None = None
        self.prompt_token_ids: tuple[int, ...] = ()
        self._start = start
        self._retry = retry
        self._clock = clock
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._began_at = 0.0
        self._first_token_at: float | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._result: Completion | None = None

    @property
    def result(self) -> Completion:
        """The whole completion.

        Raises:
            RuntimeError: it has not ended yet.
        """
        if self._result is None:
            raise RuntimeError("the completion has not ended: iterate over it first")
        return self._result

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids received so far: what `resume_token_ids` of a next call takes when this one breaks."""
        return tuple(self._token_ids)

    def __aiter__(self) -> AsyncIterator[Part]:
        return self

    async def __anext__(self) -> Part:
        if self._result is not None:
            raise StopAsyncIteration
        if self._call is None:
            self._began_at = self._clock()
            self._call = self._start()
        async with our_errors():
            while (frame := await self._read()) is not None:
                part = self._take(frame)
                if part is not None:
                    return part
        if self._result is None:
            raise OutriderError("the stream ended before the completion did")
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the call if it still runs; the verifier frees what it held."""
        if self._call is not None:
            self._call.cancel()

    async def _read(self) -> generate_pb2.GenerateResponse | None:
        """The next frame; None at the end of the stream. Starts the call again where the peer serves another name."""
        while self._call is not None:
            try:
                frame = await self._call.read()
                return None if frame is grpc.aio.EOF else cast("generate_pb2.GenerateResponse", frame)
            except grpc.aio.AioRpcError as error:
                if not self._retry(error):
                    raise
                self._call = self._start()
        return None

    def _take(self, frame: generate_pb2.GenerateResponse) -> Part | None:
        match frame.WhichOneof("frame"):
            case "started":
                self.request_id, self.seed = frame.started.request_id, frame.started.seed
                self.prompt_token_ids = tuple(frame.started.prompt_token_ids)
            case "output":
                part = to_part(frame.output)
                if part.token_ids and self._first_token_at is None:
                    self._first_token_at = self._clock()
                self._texts.append(part.text)
                self._token_ids += part.token_ids
                return part
            case "finished":
                self._finish(frame.finished)
        return None

    def _finish(self, finished: generate_pb2.Finished) -> None:
        reason, matched, usage = to_ending(finished)
        ttft_s = None if self._first_token_at is None else self._first_token_at - self._began_at
        self._result = Completion(
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            prompt_token_ids=self.prompt_token_ids,
            seed=self.seed or 0,
            reason=reason,
            matched=matched,
            usage=usage,
            timings=Timings(ttft_s=ttft_s, total_s=self._clock() - self._began_at, received_tokens=len(self._token_ids)),
        )


@asynccontextmanager
async def our_errors() -> AsyncIterator[None]:
    """Turn gRPC's errors into our own."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
