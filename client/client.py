"""The Python client: streams completions from a verifier service or a draft service. It knows no model, tokenizer or tensor."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.v1 import draft_pb2_grpc, generate_pb2, info_pb2, verifier_pb2_grpc

from client.completion import Completion, Prompt, ServiceInfo
from client.convert import to_info, to_request
from client.generation import Generation, our_errors
from shared.sampling import Mode

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_DEADLINE_S = 600.0

# A client may point at either service: they serve the same messages under different names.
_DOORS = (verifier_pb2_grpc.VerifierServiceStub, draft_pb2_grpc.DraftServiceStub)
# Prompts and token ids of the longest contexts, with room; gRPC's own default of 4 MiB bounds only what is received.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 16 << 20),)


class Client:
    """A connection to a verifier service or a draft service.

        async with Client("127.0.0.1:50051") as client:
            async for part in client.generate("Hello", max_tokens=32, temperature=0):
                print(part.text, end="")

    Args:
        address: `host:port` of either service.
        credentials: for TLS; None is plain text.
        metadata: sent with every call.
        clock: monotonic seconds, for timings.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._door = 0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()

    async def open(self) -> None:
        """Make the connection, inside the event loop that will use it; it connects when it is first needed."""
        options = list(_CHANNEL_OPTIONS)
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.address, options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, self._credentials, options)

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        mode: Mode | str | None = None,
        request_id: str | None = None,
        resume_token_ids: Sequence[int] = (),
        deadline_s: float = DEFAULT_DEADLINE_S,
        **options: Any,
    ) -> Generation:
        """Start a completion; nothing is sent before the first part is asked for.

        Args:
            prompt: text, messages (`{"role": ..., "content": ...}`, rendered with the model's template) or token ids.
            mode: `coupled` or `rejection`; None leaves it to the server.
            request_id: name in the server's logs and errors; None leaves it to the server.
            resume_token_ids: tokens that an earlier, broken call already delivered; give that call's seed too.
            deadline_s: seconds after which the call is given up.
            options: `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`
                (addend by token id), `seed`; `max_tokens`, `min_tokens`, `stop` (list of strings), `stop_token_ids`, `ignore_eos`;
                `max_draft_tokens` (0 turns speculation off), `preferred_drafter`; `priority`, `tenant`. Ranges are in generate.proto;
                None is unset.

        Returns:
            An async iterator of parts that cancels the call when it is closed or dropped; `result` has the whole once it is exhausted.

        Raises:
            InvalidRequest: a value cannot be sent at all. What the server refuses is raised by the iteration.
        """
        request = to_request(prompt, mode=mode, request_id=request_id, resume_token_ids=resume_token_ids, options=options)
        doors: list[int] = []

        def start() -> "grpc.aio.UnaryStreamCall[Any, Any]":
            doors.append(self._door)
            return self._start(request, deadline_s)

        return Generation(start, lambda error: self._next_door(error, doors[-1]), self._clock)

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """A whole completion; takes what `generate` takes."""
        async with self.generate(prompt, **options) as generation:
            async for _ in generation:
                pass
            return generation.result

    async def info(self, *, deadline_s: float = 10.0) -> ServiceInfo:
        """What the service runs and takes.

        Raises:
            OutriderError: it cannot be reached, or says why not.
            TimeoutError: the deadline passed.
        """
        while True:
            door = self._door
            async with our_errors():
                try:
                    get_info = self._stub().GetInfo
                    return to_info(await get_info(info_pb2.GetInfoRequest(), timeout=deadline_s, metadata=self._metadata))
                except grpc.aio.AioRpcError as error:
                    if not self._next_door(error, door):
                        raise

    async def health(self, service: str = "", *, deadline_s: float = 5.0) -> str:
        """`SERVING`, `NOT_SERVING` (loading, draining or stalled), or `SERVICE_UNKNOWN`.

        Args:
            service: full name of one gRPC service; empty for all of the process.
            deadline_s: seconds after which the call is given up.

        Raises:
            OutriderError: it cannot be reached.
            TimeoutError: the deadline passed.
        """
        stub = cast("Any", health_pb2_grpc.HealthStub(cast("Any", self._open())))
        async with our_errors():
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=deadline_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return "SERVICE_UNKNOWN"
                raise
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with Client(...) as client`")
        return self._channel

    def _stub(self) -> Any:
        return _DOORS[self._door](cast("Any", self._open()))

    def _start(self, request: generate_pb2.GenerateRequest, deadline_s: float) -> "grpc.aio.UnaryStreamCall[Any, Any]":
        return cast("grpc.aio.UnaryStreamCall[Any, Any]", self._stub().Generate(request, timeout=deadline_s, metadata=self._metadata))

    def _next_door(self, error: grpc.aio.AioRpcError, door: int) -> bool:
        """Whether to ask again under the next service name, because the peer does not serve the one that was asked, `door`."""
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED or door + 1 == len(_DOORS):
            return False
        self._door = max(self._door, door + 1)  # another call may have found out before
        return True
