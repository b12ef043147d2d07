"""The crossing between event loop and engine thread: real thread, real engine, tiny model."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import structlog

from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from shared.errors import EngineFailure, HandshakeRefused, InvalidRequest, Overloaded, Unavailable
from shared.link import PROTOCOL_REVISION, Capacity, Hello, Proposal, ProposalBatch, Resync, StepBatch
from shared.sampling import Mode, SamplingParams
from tests.support.oracle import PlainDecoder
from tests.support.tiny_models import tiny_llama
from verifier_service.engine import Engine, EngineLimits
from verifier_service.request import FinishReason, Request, Stopping
from verifier_service.scheduler import SchedulerLimits
from verifier_service.service import Verifier
from verifier_service.stats import StepStats

TARGET = tiny_llama()
ORACLE = PlainDecoder(TARGET)
NUM_BLOCKS = 64


def ask(name: str, max_tokens: int = 12) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(), Stopping(max_tokens), seed=len(name), max_draft_tokens=4)


def hello(instance: str = "a", fingerprint: str = "", revision: int = PROTOCOL_REVISION) -> Hello:
    return Hello(revision, instance, instance, fingerprint, (Mode.COUPLED,), 4)


@dataclass
class Running:
    verifier: Verifier
    allocator: BlockAllocator
    runner: ModelRunner
    stats: list[StepStats]
    crashed: asyncio.Event

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the engine thread tells nobody when it has freed blocks
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(max_queue: int = 4, max_running: int = 4, entropy: Callable[[], int] = lambda: 7) -> AsyncIterator[Running]:
    allocator, runner = BlockAllocator(NUM_BLOCKS, 4), ModelRunner(TARGET, NUM_BLOCKS, 4)
    limits = EngineLimits(SchedulerLimits(max_running, 64, 4), 8)
    stats: list[StepStats] = []
    crashed = asyncio.Event()
    verifier = Verifier("finger", max_queue, max_running, time.monotonic, stats.append, lambda _: None, crashed.set)
    verifier.start(
        lambda tell, on_forward: Engine(
            runner, allocator, TARGET.vocab_size, limits, "expanded", tell, time.monotonic, entropy, on_forward=on_forward
        )
    )
    try:
        yield Running(verifier, allocator, runner, stats, crashed)
    finally:
        await verifier.close()


async def collect(verifier: Verifier, request: Request) -> list[int]:
    token_ids: list[int] = []
    async with verifier.open(request) as emissions:
        async for emission in emissions:
            token_ids.extend(emission.token_ids)
    return token_ids


async def test_concurrent_requests_each_get_their_own_tokens():
    async with running() as service:
        asked = [ask(f"r{'x' * i}", 10 + i) for i in range(6)]
        texts = await asyncio.gather(*(collect(service.verifier, request) for request in asked))
        assert texts == [ORACLE.tokens(request) for request in asked]
        await service.until(lambda: service.allocator.num_free == NUM_BLOCKS)


async def test_more_streams_than_are_served_at_one_go_each_get_their_tokens_in_order():
    async with running(max_running=24) as service:
        asked = [replace(ask("r", 8), request_id=f"r{index}", seed=index) for index in range(24)]
        texts = await asyncio.gather(*(collect(service.verifier, request) for request in asked))
        assert texts == [ORACLE.tokens(request) for request in asked]


async def test_what_is_held_back_is_delivered_when_the_model_runs_again(monkeypatch):
    monkeypatch.setattr("verifier_service.delivery._HELD_S", 1e6)  # never by time
    async with running(max_running=25) as service:
        asked = [replace(ask("r", 8), request_id=f"r{index}", seed=index) for index in range(24)]
        async with service.verifier.open(ask("long", 150)) as going_on:
            tasks = [asyncio.create_task(collect(service.verifier, request)) for request in asked]
            _, late = await asyncio.wait(tasks, timeout=20)
            for task in late:
                task.cancel()
            assert not late
            assert [task.result() for task in tasks] == [ORACLE.tokens(request) for request in asked]
            await anext(going_on)


async def test_the_stream_ends_with_the_reason():
    async with running() as service, service.verifier.open(ask("r", 3)) as emissions:
        last = [emission async for emission in emissions][-1]
        assert last.finish is FinishReason.LENGTH


async def test_leaving_a_request_frees_its_blocks():
    async with running() as service:
        async with service.verifier.open(ask("r", 200)) as emissions:
            await anext(emissions)
            assert service.allocator.num_free < NUM_BLOCKS
        assert service.verifier.num_live == 0
        await service.until(lambda: service.allocator.num_free == NUM_BLOCKS)


async def test_an_id_can_be_used_again_at_once_but_not_twice_at_the_same_time():
    async with running() as service:
        async with service.verifier.open(ask("r", 200)) as emissions:
            await anext(emissions)
            with pytest.raises(InvalidRequest) as refused:
                async with service.verifier.open(ask("r")):
                    pass
            assert refused.value.field == "request_id"
        assert await collect(service.verifier, ask("r")) == ORACLE.tokens(ask("r"))


async def test_beyond_the_queue_a_request_is_refused_and_the_others_go_on():
    async with running(max_queue=1, max_running=1) as service:
        verifier = service.verifier
        async with verifier.open(ask("a", 50)) as first, verifier.open(ask("bb", 5)) as second:
            with pytest.raises(Overloaded):
                await collect(verifier, ask("ccc"))
            assert [emission async for emission in first]
            assert [emission async for emission in second]


async def test_a_drafter_that_does_not_fit_is_refused_and_remembered():
    async with running() as service:
        for wrong in (hello(fingerprint="other"), hello(revision=PROTOCOL_REVISION + 1)):
            with pytest.raises(HandshakeRefused):
                service.verifier.attach(wrong, lambda batch: None, lambda reason: None)
        assert len(service.verifier.refused_drafters()) == 2
        assert service.verifier.drafters() == ()


async def test_of_one_instance_the_newest_stream_wins():
    async with running() as service:
        closed: list[str] = []
        service.verifier.attach(hello("same"), lambda batch: None, closed.append)
        service.verifier.attach(hello("same"), lambda batch: None, lambda reason: closed.append("wrong one"))
        await service.until(lambda: len(service.verifier.drafters()) == 1)
        assert closed == ["a newer stream of the same instance has attached"]


async def test_an_attached_drafter_is_told_of_requests():
    async with running() as service:
        batches: list[StepBatch] = []
        service.verifier.attach(hello(), batches.append, lambda reason: None)
        await service.until(lambda: len(service.verifier.drafters()) == 1)
        await collect(service.verifier, ask("r"))
        await service.until(lambda: any(batch.ends for batch in batches))
        assert [begin.token_ids[:3] for batch in batches for begin in batch.begins] == [(1, 2, 3)]
        committed = [token for batch in batches for commit in batch.commits for token in commit.token_ids]
        assert committed == ORACLE.tokens(ask("r"))[: len(committed)]


@asynccontextmanager
async def computing(service: Running, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """For as long as the context lives the engine is in the middle of a step."""
    entered, release = threading.Event(), threading.Event()
    forward = service.runner.forward

    def wait_first(spans):
        entered.set()
        release.wait(60)
        return forward(spans)

    monkeypatch.setattr(service.runner, "forward", wait_first)
    try:
        async with service.verifier.open(ask("busy", 1)):
            await asyncio.to_thread(entered.wait)
            yield
    finally:
        monkeypatch.setattr(service.runner, "forward", forward)
        release.set()


def piece(num_tokens: int = 1) -> ProposalBatch:
    return ProposalBatch(0, 0.0, (Proposal(99, 3, 5, (1,) * num_tokens),), False)


async def test_what_comes_during_a_step_waits_as_one_piece_of_work_and_is_all_taken(monkeypatch):
    async with running() as service:
        link = service.verifier.attach(hello(), lambda batch: None, lambda reason: None)
        async with computing(service, monkeypatch):
            for _ in range(1000):
                service.verifier.receive(link, piece())
        counters = service.verifier.link_counters
        await service.until(lambda: counters()[link].received == 1000)
        assert counters()[link].stale["unknown_sequence"] == 1000


@pytest.mark.parametrize(("frame", "num_taken"), [(Capacity(3), 1024), (piece(num_tokens=64), 1024), (Resync(1), 1024)])
async def test_a_drafter_that_sends_more_than_is_taken_is_left_and_the_request_goes_on(monkeypatch, frame, num_taken):
    async with running() as service:
        closed: list[str] = []
        link = service.verifier.attach(hello(), lambda batch: None, closed.append)
        await service.until(lambda: len(service.verifier.drafters()) == 1)
        async with computing(service, monkeypatch):
            for _ in range(num_taken):
                service.verifier.receive(link, frame)
            assert closed == []
            for _ in range(100_000):
                service.verifier.receive(link, frame)
            assert closed == ["the draft service sends more than is taken"]
        await service.until(lambda: service.verifier.drafters() == ())
        assert await collect(service.verifier, ask("r")) == ORACLE.tokens(ask("r"))


async def test_a_request_that_cannot_be_taken_in_ends_with_an_error_and_the_engine_goes_on():
    def fail_first() -> int:
        if next(numbers) == 0:
            raise RuntimeError("no entropy")
        return 1

    numbers = itertools.count()
    async with running(entropy=fail_first) as service:
        async with service.verifier.open(ask("r")) as emissions:
            failed = [emission async for emission in emissions]
        assert [type(emission.error) for emission in failed] == [EngineFailure]
        assert failed[0].request_id == "r"
        assert await collect(service.verifier, ask("s")) == ORACLE.tokens(ask("s"))
        assert not service.crashed.is_set()


async def test_a_frame_that_the_engine_cannot_deal_with_ends_its_link_alone():
    async with running() as service:
        closed: list[str] = []
        bad = service.verifier.attach(hello("bad"), lambda batch: None, closed.append)
        service.verifier.attach(hello("good"), lambda batch: None, lambda reason: closed.append("wrong one"))
        service.verifier.receive(bad, ProposalBatch(1, 0.0, (Proposal([], 0, 0, (1,)),), False))  # no such number can be looked up
        await service.until(lambda: len(service.verifier.drafters()) == 1)
        await service.until(lambda: closed != [])
        assert closed == ["the verifier could not deal with what this link has sent"]
        assert [info.name for info in service.verifier.drafters()] == ["good"]
        assert await collect(service.verifier, ask("r")) == ORACLE.tokens(ask("r"))


async def test_a_step_that_fails_fails_who_was_in_it_and_the_engine_goes_on(monkeypatch):
    async with running() as service:
        forward = service.runner.forward

        def fail_once(spans):
            monkeypatch.setattr(service.runner, "forward", forward)
            raise RuntimeError("the device is out of memory")

        monkeypatch.setattr(service.runner, "forward", fail_once)
        with structlog.testing.capture_logs() as lines:
            async with service.verifier.open(ask("r")) as emissions:
                failed = [emission async for emission in emissions]
        assert isinstance(failed[-1].error, EngineFailure)
        assert [line["request_ids"] for line in lines if line["event"] == "step failed"] == [["r"]]
        assert await collect(service.verifier, ask("s")) == ORACLE.tokens(ask("s"))
        assert service.allocator.num_free == NUM_BLOCKS


async def test_what_was_computed_before_the_engine_died_still_arrives(monkeypatch):
    async with running(max_running=24) as service, AsyncExitStack() as opened:
        forward, all_are_there = service.runner.forward, threading.Event()
        num_forwards = itertools.count()

        def die_in_the_third(spans):
            all_are_there.wait(60)
            if next(num_forwards) == 2:
                raise SystemExit
            return forward(spans)

        monkeypatch.setattr(service.runner, "forward", die_in_the_third)
        asked = [replace(ask("r", 1), request_id=f"r{index}") for index in range(16)]
        (dying,) = [thread for thread in threading.enumerate() if thread.name == "verifier-engine"]
        unfinished = await opened.enter_async_context(service.verifier.open(ask("unfinished", 3)))
        complete = [await opened.enter_async_context(service.verifier.open(request)) for request in asked]
        all_are_there.set()
        dying.join(60)  # the loop hears of all its steps and of its end at once
        for emissions in complete:
            assert [emission.finish async for emission in emissions] == [FinishReason.LENGTH]
        assert isinstance([emission async for emission in unfinished][-1].error, EngineFailure)


async def test_if_the_engine_dies_its_requests_end_with_an_error_and_new_ones_are_refused(monkeypatch):
    async with running() as service:
        async with service.verifier.open(ask("r", 200)) as emissions:
            await anext(emissions)
            monkeypatch.setattr(service.allocator, "release", None)  # the books are broken: nothing can be trusted any more
            async with service.verifier.open(ask("s", 1)) as others:
                ends = [emission async for emission in others]
            assert isinstance(ends[-1].error, EngineFailure)
            assert isinstance([emission async for emission in emissions][-1].error, EngineFailure)
        await service.crashed.wait()
        with pytest.raises(Unavailable) as refused:
            async with service.verifier.open(ask("t")):
                pass
        assert refused.value.reason == "ENGINE_STALLED"
