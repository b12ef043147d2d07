"""A verifier with a real engine thread and a tiny model, as its servicers see it. It checks nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from shared.link import PROTOCOL_REVISION, Hello
from shared.sampling import Mode, SamplingParams
from tests.support.oracle import PlainDecoder
from tests.support.tiny_models import tiny_llama
from verifier_service.engine import Engine, EngineLimits
from verifier_service.request import Request, Stopping
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
