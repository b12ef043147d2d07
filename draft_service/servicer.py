"""`DraftService` over gRPC: the edge door. It passes calls on to the verifier as they are and knows nothing of what they compute."""

from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import grpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, generate_pb2, info_pb2, verifier_pb2_grpc

from draft_service.link_client import LinkState
from shared.errors import Unavailable
from shared.link import PROTOCOL_REVISION
from shared.rpc.convert_generate import is_request_id
from shared.rpc.interceptors import current_call
from shared.rpc.server import add_to_running
from shared.rpc.status import read_status

# The file that declares the service has to be loaded for reflection to know it.
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
_INFO_TIMEOUT_S = 2.0

# What belongs to one hop, not to the call; gRPC's own (`grpc-...`, `:...`) go with it.
_HOP_METADATA = frozenset({"user-agent", "content-type", "te", "host", "x-request-id"})


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The edge door. Calls must come through `shared.rpc.interceptors.CallInterceptor`.

    Args:
        verifier: channel to `VerifierService`.
        instance_id: of this draft service; requests ask for it as their drafter unless they name one.
        name: for people.
        proposer: `ngram`, or the draft model's name.
        link_address: of the verifier's link.
        link_state: whether this draft service is attached now.
    """

    def __init__(
        self, verifier: grpc.aio.Channel, instance_id: str, name: str, proposer: str, link_address: str, link_state: Callable[[], LinkState]
    ) -> None:
        self._stub = verifier_pb2_grpc.VerifierServiceStub(verifier)
        self._instance_id = instance_id
        self._name = name
        self._proposer = proposer
        self._link_address = link_address
        self._link_state = link_state

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Take this service's calls on a server that runs already."""
        add_to_running(draft_pb2_grpc.add_DraftServiceServicer_to_server, self, server)

    async def Generate(  # noqa: N802  # the name is the proto's
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """One completion, by the verifier; see draft.proto."""
        record = current_call()
        if is_request_id(request.request_id):
            record.rename(request.request_id)
        if not request.speculation.HasField("preferred_drafter"):
            request.speculation.preferred_drafter = self._instance_id
        metadata = (*_passed_on(context.invocation_metadata() or ()), ("x-request-id", record.request_id))
        call = self._stub.Generate(request, metadata=metadata, timeout=context.time_remaining())
        try:
            first = True
            async for response in call:
                if first:
                    await context.send_initial_metadata(_passed_on(await call.initial_metadata()))
                    first = False
                yield response
            context.set_trailing_metadata(_passed_on(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and read_status(error) is None:  # gRPC's own word, not the verifier's
                raise Unavailable("VERIFIER_UNREACHABLE", "the verifier is out of reach of this draft service") from error
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def GetInfo(  # noqa: N802  # the name is the proto's
        self, request: info_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> info_pb2.GetInfoResponse:
        """The verifier's info, if it is in reach, and this draft service's own."""
        del context
        try:
            answer = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            answer = info_pb2.GetInfoResponse(version=version("outrider"), protocol_revision=PROTOCOL_REVISION)
        state = self._link_state()
        own = info_pb2.DraftServiceInfo(
            instance_id=self._instance_id,
            name=self._name,
            proposer=self._proposer,
            link_address=self._link_address,
            attached=state.attached,
            detached_reason=state.detached_reason,
        )
        answer.draft_service.CopyFrom(own)
        return answer


def _passed_on(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """The part of a hop's metadata that belongs to the call."""
    return tuple((key, value) for key, value in metadata if key not in _HOP_METADATA and not key.startswith(("grpc-", ":")))
