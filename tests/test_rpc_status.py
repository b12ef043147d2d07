import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import (
    CorruptOutput,
    EngineFailure,
    HandshakeRefused,
    InvalidRequest,
    OutOfBlocks,
    OutriderError,
    Overloaded,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
)
from shared.rpc.status import from_rpc_error, to_grpc_status, to_status

Code = grpc.StatusCode

TABLE = [
    (InvalidRequest("sampling.top_p", "must be in (0, 1]"), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (ProtocolViolation("a second hello"), Code.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    (HandshakeRefused("another tokenizer"), Code.FAILED_PRECONDITION, "HANDSHAKE_REFUSED"),
    (Unauthenticated("no token"), Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (Overloaded("the queue is full", retry_after_s=0.25), Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (Unavailable("DRAINING", "shutting down", retry_after_s=2.5), Code.UNAVAILABLE, "DRAINING"),
    (CorruptOutput("not finite"), Code.DATA_LOSS, "CORRUPT_OUTPUT"),
]


def _details(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
        for detail in status.details:
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
    return found


def _as_rpc_error(error: BaseException) -> grpc.aio.AioRpcError:
    status = to_grpc_status(error, "req-1")
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details)


@pytest.mark.parametrize(("error", "code", "reason"), TABLE)
def test_each_error_has_its_code_reason_and_request_id(error: OutriderError, code: grpc.StatusCode, reason: str) -> None:
    status = to_status(error, "req-1")
    info = _details(status)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert status.code == code.value[0]
    assert (info.reason, info.domain, info.metadata["request_id"]) == (reason, "outrider", "req-1")
    assert rpc_status.to_status(status).code is code


@pytest.mark.parametrize(("error", "code", "reason"), TABLE)
def test_an_error_comes_back_as_what_it_was(error: OutriderError, code: grpc.StatusCode, reason: str) -> None:
    del code
    back = from_rpc_error(_as_rpc_error(error))
    assert isinstance(back, OutriderError)
    assert type(back) is type(error)
    assert (str(back), back.reason, back.request_id) == (str(error), reason, "req-1")
    if isinstance(error, InvalidRequest):
        assert isinstance(back, InvalidRequest)
        assert (back.field, back.message) == (error.field, error.message)
    if isinstance(error, Overloaded | Unavailable):
        assert isinstance(back, Overloaded | Unavailable)
        assert back.retry_after_s == error.retry_after_s


def test_a_wrong_field_is_named_in_a_field_violation() -> None:
    bad_request = _details(to_status(InvalidRequest("stopping.stop[3]", "is empty"), "r"))["BadRequest"]
    assert isinstance(bad_request, error_details_pb2.BadRequest)
    assert [(violation.field, violation.description) for violation in bad_request.field_violations] == [("stopping.stop[3]", "is empty")]


@pytest.mark.parametrize("error", [EngineFailure("secret"), OutOfBlocks("secret"), ValueError("secret"), KeyError("secret")])
def test_text_of_our_own_faults_stays_here(error: Exception) -> None:
    status = to_status(error, "req-7")
    assert status.code == Code.INTERNAL.value[0]
    assert "req-7" in status.message
    assert b"secret" not in status.SerializeToString()
    assert isinstance(from_rpc_error(_as_rpc_error(error)), EngineFailure)


def test_a_long_quotation_does_not_outgrow_the_trailers() -> None:
    status = to_status(InvalidRequest("text", "x" * 100_000), "r")
    assert status.ByteSize() < 8192


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (Code.UNAVAILABLE, Unavailable, "UNREACHABLE"),
        (Code.RESOURCE_EXHAUSTED, OutriderError, "RESOURCE_EXHAUSTED"),
        (Code.UNIMPLEMENTED, OutriderError, "UNIMPLEMENTED"),
    ],
)
def test_a_call_that_grpc_itself_failed_keeps_its_code_as_reason(code: grpc.StatusCode, kind: type[OutriderError], reason: str) -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "from gRPC"))
    assert type(error) is kind
    assert (error.reason, str(error)) == (reason, "from gRPC")


def test_a_passed_deadline_is_a_timeout() -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(Code.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "too late"))
    assert isinstance(error, TimeoutError)


def test_a_status_that_a_proxy_has_changed_is_read_as_having_no_details() -> None:
    status = to_grpc_status(Unavailable("DRAINING", "shutting down"), "r")
    changed = grpc.aio.AioRpcError(Code.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), "upstream reset")
    error = from_rpc_error(changed)
    assert isinstance(error, OutriderError)
    assert error.reason == "UNREACHABLE"
