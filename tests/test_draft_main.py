"""The draft service's process as a whole, in this one: what its health tells, and what becomes of it if a part fails."""

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import structlog
from outrider.v1 import draft_pb2_grpc, info_pb2, link_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import draft_service.main
from draft_service.config import DraftConfig
from draft_service.metrics import DraftMetrics
from shared.errors import EngineFailure
from shared.rpc.channel import open_channel
from shared.rpc.health import HealthStatus, check
from tests.support.rpc import WELCOME, RecordingLinks, serving
from verifier_service.link_servicer import LinkServicer

LINK = "outrider.v1.LinkService"
DOOR = "outrider.v1.DraftService"


@dataclass
class Running:
    task: asyncio.Task[None]
    lines: list[Any]

    async def line(self, event: str) -> dict[str, Any]:
        """The first log line of that event."""
        await self.until(lambda: any(line["event"] == event for line in self.lines))
        found: dict[str, Any] = next(line for line in self.lines if line["event"] == event)
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition() and not self.task.done():  # noqa: ASYNC110 - a log tells nobody
                await asyncio.sleep(0.01)

    async def has_health(self, service: str, wanted: HealthStatus) -> bool:
        address = (await self.line("serving") and await self.line("listening"))["clients"]
        async with asyncio.timeout(60):
            while await check(address, service) is not wanted:  # noqa: ASYNC110 - health is asked for, it does not call
                await asyncio.sleep(0.01)
        return True


@asynccontextmanager
async def drafting(link: str) -> AsyncIterator[Running]:
    """A draft service that is told to attach there; a signal ends it."""
    config = DraftConfig(link=link, verifier="127.0.0.1:1", listen="127.0.0.1:0", metrics="127.0.0.1:0", drain_grace_s=0.0)
    with structlog.testing.capture_logs() as lines:
        task = asyncio.create_task(draft_service.main._serve(config))  # noqa: SLF001 - `run` starts a loop of its own
        running = Running(task, lines)
        try:
            await running.until(lambda: any(line["event"] == "serving" for line in lines))
            yield running
        finally:
            if not task.done():
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait([task], timeout=60)


def _add(links: RecordingLinks) -> Callable[[grpc.aio.Server], object]:
    return lambda server: link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links, WELCOME), server)


async def test_health_tells_a_refused_draft_service_from_an_attached_one_while_its_door_serves() -> None:
    links = RecordingLinks(refuse="its tokenizer is not the target's")
    async with serving(_add(links)) as address, drafting(address) as draft:
        assert "not the target's" in (await draft.line("not attached to the verifier"))["reason"]
        assert await draft.has_health(LINK, HealthStatus.NOT_SERVING)
        assert await draft.has_health(DOOR, HealthStatus.SERVING)
        assert await draft.has_health("", HealthStatus.SERVING)
    assert draft.task.exception() is None


async def test_health_of_the_link_follows_the_link() -> None:
    links = RecordingLinks()
    async with serving(_add(links)) as address, drafting(address) as draft:
        link = await links.attached.get()
        assert await draft.has_health(LINK, HealthStatus.SERVING)
        links.refuse = "not again"
        links.close[link]("enough")
        assert await draft.has_health(LINK, HealthStatus.NOT_SERVING)
        assert await draft.has_health(DOOR, HealthStatus.SERVING)
    assert draft.task.exception() is None


async def test_calls_the_event_loop_and_the_engine_are_in_the_metrics() -> None:
    async with serving(_add(RecordingLinks())) as address, drafting(address) as draft:
        listening = await draft.line("listening")
        async with open_channel(listening["clients"]) as channel:
            await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(info_pb2.GetInfoRequest())

        def scrape() -> dict[str, float]:
            with urllib.request.urlopen(f"http://{listening['metrics']}/metrics") as page:
                families = list(text_string_to_metric_families(page.read().decode()))
            own = {"grpc_service": DOOR, "grpc_method": "GetInfo", "grpc_code": "OK"}
            return {sample.name: sample.value for family in families for sample in family.samples if sample.labels in ({}, own)}

        async with asyncio.timeout(60):
            while (series := await asyncio.to_thread(scrape))["outrider_event_loop_lag_seconds_count"] < 2:
                pass
        assert series["outrider_grpc_server_handled_total"] == 1
        assert series["outrider_draft_engine_step_age_seconds"] < 60


async def test_a_part_that_fails_ends_the_process_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such series")

    monkeypatch.setattr(draft_service.main, "_WATCH_S", 0.01)
    monkeypatch.setattr(DraftMetrics, "observe", fail)
    async with serving(_add(RecordingLinks())) as address, drafting(address) as draft:
        await draft.until(lambda: False)
    assert isinstance(draft.task.exception(), EngineFailure)
    assert any(line["event"] == "a part of the draft service has failed" for line in draft.lines)
