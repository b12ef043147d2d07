"""The remote end of the client's tests: a real gRPC server on a port of its own that answers Generate by a script.

It runs on threads, so that a command under test may have the process's one asyncio loop for itself.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from outrider.v1 import draft_pb2_grpc, generate_pb2, info_pb2, verifier_pb2_grpc

from shared.errors import OutriderError
from shared.rpc.status import to_grpc_status

STARTED = generate_pb2.GenerateResponse(started=generate_pb2.Started(request_id="r-1", prompt_token_ids=[5, 6], seed=42))
FINISHED = generate_pb2.GenerateResponse(
    finished=generate_pb2.Finished(
        reason=generate_pb2.FINISH_REASON_STOP_STRING,
        stop="\n\n",
        usage=generate_pb2.Usage(prompt_tokens=2, generated_tokens=4, rounds=2, drafted_tokens=4, accepted_tokens=2),
    )
)


def output(text: str, *token_ids: int, accepted: int = 0) -> generate_pb2.GenerateResponse:
    """One frame of new tokens."""
    return generate_pb2.GenerateResponse(output=generate_pb2.Output(text=text, token_ids=token_ids, accepted=accepted))


WHOLE = (STARTED, output("Hel", 10, 11, accepted=1), output("lo", 12, 13, accepted=1), FINISHED)


@dataclass
class ScriptedServer:
    """What to answer, and what was asked.

    Args:
        script: frames of every Generate call; an error ends the call with its status.
        hangs: whether a call stays open after its script until the client cancels it.
        cancelled: set once a call ended before its script did.
    """

    script: Sequence[generate_pb2.GenerateResponse | OutriderError] = WHOLE
    hangs: bool = False
    info: info_pb2.GetInfoResponse = field(default_factory=info_pb2.GetInfoResponse)
    states: health.HealthServicer = field(default_factory=health.HealthServicer)
    requests: list[generate_pb2.GenerateRequest] = field(default_factory=list)
    deadlines_s: list[float] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def generate(self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[generate_pb2.GenerateResponse]:
        """Play the script."""
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        whole = threading.Event()
        ended = threading.Event()

        def on_end() -> None:
            if not whole.is_set():
                self.cancelled.set()
            ended.set()

        context.add_callback(on_end)
        for frame in self.script:
            if isinstance(frame, OutriderError):
                context.abort_with_status(to_grpc_status(frame, "r-1"))
            yield frame
        if self.hangs:
            ended.wait()
        whole.set()


class _VerifierDoor(verifier_pb2_grpc.VerifierServiceServicer):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def Generate(self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[generate_pb2.GenerateResponse]:  # noqa: N802
        return self._server.generate(request, context)

    def GetInfo(self, request: info_pb2.GetInfoRequest, context: grpc.ServicerContext) -> info_pb2.GetInfoResponse:  # noqa: N802
        return self._server.info


class _DraftDoor(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def Generate(self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[generate_pb2.GenerateResponse]:  # noqa: N802
        return self._server.generate(request, context)

    def GetInfo(self, request: info_pb2.GetInfoRequest, context: grpc.ServicerContext) -> info_pb2.GetInfoResponse:  # noqa: N802
        return self._server.info


@contextmanager
def scripted_server(door: str = "verifier") -> Iterator[ScriptedServer]:
    """A server that plays the whole script, until told otherwise.

    Args:
        door: `verifier` or `draft`: which service it offers.
    """
    scripted = ScriptedServer()
    server = grpc.server(ThreadPoolExecutor(8))
    if door == "verifier":
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(_VerifierDoor(scripted), server)
    else:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(_DraftDoor(scripted), server)
    health_pb2_grpc.add_HealthServicer_to_server(scripted.states, server)
    scripted.states.set("", health_pb2.HealthCheckResponse.SERVING)
    scripted.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield scripted
    finally:
        server.stop(0).wait()
