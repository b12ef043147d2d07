"""Everything that can go wrong, in our own terms. `shared.rpc.status` alone knows which gRPC status each becomes.

OutriderError
├── InvalidRequest        a field of a request is wrong; never worth a retry
├── ProtocolViolation     a frame that the link's protocol forbids
├── HandshakeRefused      this draft service cannot serve this verifier
├── Unauthenticated       no token, or a wrong one
├── Overloaded            no room now; worth a retry after a while
├── Unavailable           loading, draining, or the other service is out of reach; worth a retry
├── CannotListen          an address that this process cannot serve at, told at start
├── EngineFailure         our own fault; the text stays in the log
│   └── CorruptOutput     the model's numbers for this request are not finite
├── UnsupportedModel      a model that cannot be served, told at start
└── OutOfBlocks           the KV pool is empty; the scheduler's business, never a client's
"""


class OutriderError(Exception):
    """Base of all. `reason` is stable and UPPER_SNAKE: clients branch on it, never on the text.

    `request_id` is set on the client's side, where the server told it.
    """

    reason = "INTERNAL"
    request_id: str | None = None


class InvalidRequest(OutriderError):
    """A field of a request is wrong.

    Args:
        field: path of the field as in the proto, e.g. `sampling.top_p`.
        message: what is wrong with it and what would be right, in a sentence.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ProtocolViolation(OutriderError):
    """A frame that the link's protocol forbids: wrong order, wrong shape, a second Hello."""

    reason = "PROTOCOL_VIOLATION"


class HandshakeRefused(OutriderError):
    """This draft service cannot serve this verifier; the text says why."""

    reason = "HANDSHAKE_REFUSED"


class Unauthenticated(OutriderError):
    """No token, or a wrong one."""

    reason = "UNAUTHENTICATED"


class Overloaded(OutriderError):
    """No room now.

    Args:
        message: what there is no room for.
        retry_after_s: when a retry may do better, in seconds.
    """

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """Not now, not here.

    Args:
        reason: `LOADING`, `DRAINING`, `ENGINE_STALLED`, `VERIFIER_UNREACHABLE`, `SLOW_READER` (the peer takes no messages), `LINK_SILENT`
            (a draft service was not heard from) or, on the client's side, `UNREACHABLE`.
        message: one sentence.
        retry_after_s: when a retry may do better, in seconds.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class CannotListen(OutriderError):
    """An address that this process cannot serve at; the text says which."""

    reason = "CANNOT_LISTEN"


class EngineFailure(OutriderError):
    """Our own fault. The text goes to the log, the client gets a fixed sentence and the request id."""


class CorruptOutput(EngineFailure):
    """The model's numbers for this request are not finite, so there is no next token. What was delivered before is right."""

    reason = "CORRUPT_OUTPUT"


class UnsupportedModel(OutriderError):
    """A model that cannot be served; the text says why in a sentence."""

    reason = "UNSUPPORTED_MODEL"


class OutOfBlocks(OutriderError):
    """The KV pool has fewer free blocks than were asked for. Nothing was taken."""

    reason = "OUT_OF_BLOCKS"
