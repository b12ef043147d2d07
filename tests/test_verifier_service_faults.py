"""What fails in the engine fails whom it belongs to, and nobody else: real thread, real engine, tiny model."""

import asyncio
import itertools
import threading
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import structlog
import torch

from shared.engine.forward_batch import Span
from shared.errors import EngineFailure, Unavailable
from shared.link import Proposal, ProposalBatch
from tests.support.running_verifier import NUM_BLOCKS, ORACLE, ask, collect, hello, running
from verifier_service.request import FinishReason


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


async def test_out_of_memory_a_step_is_done_in_parts_and_nobody_fails(monkeypatch):
    async with running() as service:
        forward, all_are_there, sizes = service.runner.forward, threading.Event(), []

        def hold_two(spans):
            all_are_there.wait(60)
            sizes.append(len(spans))
            if len(spans) > 2:
                raise torch.OutOfMemoryError("no room")
            return forward(spans)

        monkeypatch.setattr(service.runner, "forward", hold_two)
        assert await together(service, [ask(name) for name in ("r", "ss", "ttt", "uuuu")], all_are_there) == [
            ORACLE.tokens(ask(name)) for name in ("r", "ss", "ttt", "uuuu")
        ]
        assert max(sizes) > 2


async def test_who_makes_steps_fail_fails_alone(monkeypatch):
    culprit = replace(ask("culprit"), prompt_ids=(9, 8, 7))
    async with running() as service:
        forward, all_are_there, sizes = service.runner.forward, threading.Event(), []

        def choke(spans):
            all_are_there.wait(60)
            if any(tuple(span.token_ids[:1]) == (9,) and span.start == 0 for span in spans):
                sizes.append(len(spans))
                raise RuntimeError("choked")
            return forward(spans)

        monkeypatch.setattr(service.runner, "forward", choke)
        asked = [ask("r"), ask("ss"), culprit, ask("ttt")]
        assert await together(service, asked, all_are_there) == [EngineFailure if one is culprit else ORACLE.tokens(one) for one in asked]
        assert max(sizes) > min(sizes) == 1
        assert service.allocator.num_free == NUM_BLOCKS


async def together(service, asked, all_are_there) -> list[list[int] | type[Exception] | None]:
    """What each request got, tokens or the kind of its error; none of them begins before all are there."""

    async def read(emissions) -> list[int] | type[Exception]:
        got = [emission async for emission in emissions]
        return type(got[-1].error) if got[-1].error is not None else [token_id for emission in got for token_id in emission.token_ids]

    async with AsyncExitStack() as opened:
        streams = [await opened.enter_async_context(service.verifier.open(request)) for request in asked]
        all_are_there.set()
        return await asyncio.gather(*map(read, streams))


async def test_what_was_computed_before_the_engine_died_still_arrives(monkeypatch):
    async with running(max_running=24) as service, AsyncExitStack() as opened:
        forward, one_runs, all_are_there = service.runner.forward, threading.Event(), threading.Event()
        read: list[Span] = []

        def die_once_all_prompts_were_read(spans):
            one_runs.set()
            all_are_there.wait(60)
            if len(read) == 1 + len(asked):
                raise SystemExit
            read.extend(span for span in spans if span.start == 0)
            return forward(spans)

        monkeypatch.setattr(service.runner, "forward", die_once_all_prompts_were_read)
        asked = [replace(ask("r", 1), request_id=f"r{index}") for index in range(16)]
        (dying,) = [thread for thread in threading.enumerate() if thread.name == "verifier-engine"]
        unfinished = await opened.enter_async_context(service.verifier.open(ask("unfinished", 50)))
        await asyncio.to_thread(one_runs.wait, 60)  # the others come while it decodes, and take several steps: a share of each is theirs
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
