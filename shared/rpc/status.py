"""Our errors as gRPC statuses, and back: the one table, and the details that go with each.

It knows nothing about calls: `shared.rpc.interceptors` sends what is made here.
"""

from typing import cast

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import (
    CorruptOutput,
    EngineFailure,
    HandshakeRefused,
    InvalidRequest,
    OutriderError,
    Overloaded,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "outrider"

# Subclasses go where their base goes; what is in no row is our own fault.
STATUS_OF: dict[type[OutriderError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ProtocolViolation: grpc.StatusCode.INVALID_ARGUMENT,
    HandshakeRefused: grpc.StatusCode.FAILED_PRECONDITION,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    CorruptOutput: grpc.StatusCode.DATA_LOSS,
}

# Statuses travel in trailers, which gRPC bounds at 8 KiB: a sentence that quotes input must not cost the whole status.
_MAX_MESSAGE_CHARS = 1000


def status_code(error: BaseException) -> grpc.StatusCode:
    """The gRPC code that an exception becomes; INTERNAL for all that is in no row of the table."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException, request_id: str) -> status_pb2.Status:
    """The status that tells a client of an error, with details.

    Args:
        error: anything. Text of errors that are in no row of the table stays here.
        request_id: name of the request in the log.

    Returns:
        A status with ErrorInfo always, BadRequest for a wrong field, RetryInfo where a retry may do better.
    """
    code = status_code(error)
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"request_id": request_id})
    details: list[message.Message] = [info]
    text = f"Internal error. The server's log has it under request id {request_id}."
    if isinstance(error, OutriderError) and code is not grpc.StatusCode.INTERNAL:
        text = str(error)[:_MAX_MESSAGE_CHARS]
        info.reason = error.reason
    if isinstance(error, InvalidRequest):
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message[:_MAX_MESSAGE_CHARS])
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Unavailable):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=text, details=[_pack(detail) for detail in details])


def to_grpc_status(error: BaseException, request_id: str) -> grpc.Status:
    """`to_status` in the form that `ServicerContext.abort_with_status` takes."""
    return rpc_status.to_status(to_status(error, request_id))


def read_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The rich status of a failed call; None if the peer sent none, as when gRPC itself failed it."""
    try:
        return cast("status_pb2.Status | None", rpc_status.from_call(cast("grpc.Call", error)))
    except (ValueError, message.DecodeError):  # a proxy has changed the one and not the other
        return None


def from_rpc_error(error: grpc.aio.AioRpcError) -> OutriderError | TimeoutError:
    """What happened to a call, as the client's user meets it.

    Args:
        error: what grpc.aio raised.

    Returns:
        Our error with the server's reason, field, retry delay and request id, or TimeoutError where the deadline passed.
        A call that gRPC failed without a word from our services becomes `Unavailable("UNREACHABLE")`, or a plain `OutriderError` with
        the code's name as its reason.
    """
    text = error.details() or error.code().name
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimeoutError(text)
    status = read_status(error)
    info, violation, retry_after_s = _read_details(status) if status is not None else (None, None, 1.0)
    made = _rebuild(error.code(), info, violation, retry_after_s, text)
    if info is not None:
        made.reason = info.reason
        made.request_id = info.metadata.get("request_id")
    return made


def _rebuild(
    code: grpc.StatusCode,
    info: error_details_pb2.ErrorInfo | None,
    violation: error_details_pb2.BadRequest.FieldViolation | None,
    retry_after_s: float,
    text: str,
) -> OutriderError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(info.reason if info is not None else "UNREACHABLE", text, retry_after_s)
    if violation is not None:
        return InvalidRequest(violation.field, violation.description)
    if info is not None:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(text, retry_after_s)
        plain = {
            grpc.StatusCode.INVALID_ARGUMENT: ProtocolViolation,
            grpc.StatusCode.FAILED_PRECONDITION: HandshakeRefused,
            grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
            grpc.StatusCode.INTERNAL: EngineFailure,
            grpc.StatusCode.DATA_LOSS: CorruptOutput,
        }
        return plain.get(code, OutriderError)(text)
    made = OutriderError(text)
    made.reason = code.name
    return made


def _read_details(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.BadRequest.FieldViolation | None, float]:
    info: error_details_pb2.ErrorInfo | None = None
    violation: error_details_pb2.BadRequest.FieldViolation | None = None
    retry_after_s = 1.0
    error_info, bad_request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(error_info):
            info = error_info
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return info, violation, retry_after_s


def _pack(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
