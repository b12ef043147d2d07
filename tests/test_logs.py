"""Log lines: one formatter for both kinds of logger, the request's id, and nothing of what a traceback's variables hold."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shared import logs


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_structlog_and_stdlib_write_the_same_kind_of_line() -> None:
    stream = io.StringIO()
    logs.set_up("verifier", log_format="json", stream=stream)
    structlog.get_logger("engine").info("step", tokens=3)
    logging.getLogger("some.library").warning("from %s", "stdlib")
    first, second = lines_of(stream)
    assert (first["event"], first["tokens"], first["service"], first["level"], first["logger"]) == ("step", 3, "verifier", "info", "engine")
    assert (second["event"], second["service"], second["level"], second["logger"]) == ("from stdlib", "verifier", "warning", "some.library")


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    logs.set_up("draft", "warning", "json", stream)
    structlog.get_logger("a").info("no")
    logging.getLogger("a").info("no")
    structlog.get_logger("a").warning("yes")
    assert [line["event"] for line in lines_of(stream)] == ["yes"]


async def test_each_task_logs_its_own_request_id() -> None:
    stream = io.StringIO()
    logs.set_up("verifier", log_format="json", stream=stream)

    async def serve(request_id: str) -> None:
        with logs.bind_request(request_id):
            await asyncio.sleep(0)
            structlog.get_logger("a").info("served")

    await asyncio.gather(serve("r-1"), serve("r-2"))
    structlog.get_logger("a").info("idle")
    assert [line.get("request_id") for line in lines_of(stream)] == ["r-1", "r-2", None]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    stream = io.StringIO()
    logs.set_up("verifier", log_format=log_format, stream=stream)  # type: ignore[arg-type]

    def fail(prompt: str) -> None:
        raise RuntimeError(f"failed on {len(prompt)} characters")

    for logger in (structlog.get_logger("a"), logging.getLogger("b")):
        try:
            fail("my" + " secret" + " prompt")
        except RuntimeError:
            logger.exception("request failed")
    assert stream.getvalue().count("failed on 16 characters") >= 2
    assert "secret prompt" not in stream.getvalue()


def test_setting_up_twice_writes_each_line_once() -> None:
    stream = io.StringIO()
    logs.set_up("verifier", log_format="json", stream=stream)
    logs.set_up("verifier", log_format="json", stream=stream)
    logging.getLogger("a").warning("once")
    assert len(lines_of(stream)) == 1
