"""Log lines of a process: structlog on top of stdlib logging, for people or as JSON. It knows nothing of what is logged.

Never prompt or completion text, in any line at any level: that is up to the callers, and they keep to it.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO

import structlog

_NOISY = ("asyncio", "filelock", "httpcore", "httpx", "urllib3")

# Local variables may hold a prompt: no traceback shows them.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def set_up(service: str, level: str = "info", log_format: Literal["console", "json"] = "console", stream: TextIO | None = None) -> None:
    """Send every log line of this process, structlog's and stdlib's, through one formatter.

    Args:
        service: name on each line, e.g. `verifier`.
        level: least severe level that is written: `debug`, `info`, `warning` or `error`.
        log_format: `console` for people, coloured on a terminal or with FORCE_COLOR; `json` has one object per line.
        stream: where lines go; standard error by default.
    """
    quiet_grpc()
    stream = stream or sys.stderr

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
    ]
    render: list[structlog.typing.Processor]
    if log_format == "json":
        shared += [add_service, structlog.stdlib.add_logger_name]
        render = [_TRACEBACKS, structlog.processors.JSONRenderer()]
    else:
        colors = stream.isatty() or bool(os.environ.get("FORCE_COLOR"))
        render = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def quiet_grpc() -> None:
    """Keep gRPC's C core from writing to standard error beside the log. It reads this when it is imported, so call it first."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def bind_request(request_id: str) -> AbstractContextManager[None]:
    """Put `request_id` on every line that this task, and what it awaits or starts, logs inside the `with` block."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)
