"""The crossing between event loop and engine thread: real thread, real engine, tiny model."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from shared.errors import HandshakeRefused, InvalidRequest, Overloaded
from shared.link import PROTOCOL_REVISION, Capacity, Proposal, ProposalBatch, Resync, StepBatch
from tests.support.running_verifier import NUM_BLOCKS, ORACLE, Running, ask, collect, hello, running
from verifier_service.request import FinishReason


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
