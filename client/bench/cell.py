"""A cell of a benchmark: one load, every arm, in pairs of runs that take turns. It knows no processes; services are connected already."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from client.bench.arrivals import arrival_times
from client.bench.load import Outcome, Sample, Send, run_closed, run_open
from client.bench.measure import Run, between, read_drafts, to_run
from client.bench.prompts import Ask, Prompts
from client.bench.summary import Comparison, compare
from client.client import Client

PLAIN = "plain"
DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `concurrency` at a time, or `rate` a second.

    Args:
        concurrency: 0 for an open loop.
        rate: requests per second; 0 for a closed loop.
        burstiness: of an open loop, see `arrival_times`.
    """

    concurrency: int = 0
    rate: float = 0.0
    burstiness: float = 1.0

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A verifier that can be asked; without `metrics` its counters cannot be read."""

    client: Client
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things that are compared.

    Args:
        name: for people.
        endpoint: who is asked.
        max_draft_tokens: of each request; None leaves it to the service.
        against: arms that it is compared with, each before it in the order of arms.
    """

    name: str
    endpoint: Endpoint
    max_draft_tokens: int | None
    against: tuple[str, ...] = (PLAIN,)


@dataclass(frozen=True, slots=True)
class Request:
    """What all requests have in common.

    Args:
        temperature: 0 is greedy.
        mode: `coupled` or `rejection`; None leaves it to the service.
        ignore_eos: go on after the end-of-sequence token, so that all arms do the same work.
        deadline_s: seconds after which a request has failed.
    """

    temperature: float
    mode: str | None
    ignore_eos: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Args:
        num_requests: in each run.
        num_pairs: runs of each arm.
        num_warmups: requests of each arm beforehand.
        seed: of the arrivals.
    """

    num_requests: int
    num_pairs: int
    num_warmups: int
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """What one load gave.

    Args:
        load: which.
        rtt_ms: simulated round trip between the services, if there was one.
        runs: of each arm, by pair.
        comparisons: of arms, by pair.
    """

    load: Load
    rtt_ms: float | None
    runs: Mapping[str, tuple[Run, ...]]
    comparisons: tuple[Comparison, ...]


async def measure_cell(
    arms: Sequence[Arm], load: Load, prompts: Prompts, request: Request, plan: Plan, rtt_ms: float | None, on_run: Callable[[int, str, Run], None]
) -> Cell:
    """Runs the same requests through every arm, A B C, then other requests C B A, and so on.

    Args:
        arms: the first is the one that most are compared with.
        load: how requests come.
        prompts: where they come from; no two pairs have the same made-up ones; a file starts again at its end.
        request: what they have in common.
        plan: how many.
        rtt_ms: noted only.
        on_run: told each run as it ends, with the number of its pair.
    """
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for arm in arms:
        if plan.num_warmups:
            await _run(arm, load, prompts.asks(plan.num_warmups, plan.num_pairs * plan.num_requests), request, plan.seed - 1)
    for pair in range(plan.num_pairs):
        asks = prompts.asks(plan.num_requests, pair * plan.num_requests)
        for arm in arms if pair % 2 == 0 else reversed(arms):
            run = await _run(arm, load, asks, request, plan.seed + pair)
            runs[arm.name].append(run)
            on_run(pair, arm.name, run)
    comparisons = tuple(compare(arm.name, runs[arm.name], against, runs[against]) for arm in arms for against in arm.against)
    return Cell(load, rtt_ms, {name: tuple(made) for name, made in runs.items()}, comparisons)


async def _run(arm: Arm, load: Load, asks: Sequence[Ask], request: Request, seed: int) -> Run:
    metrics = arm.endpoint.metrics
    before = await read_drafts(metrics) if metrics else None
    outcome = await _load(load, asks, _sender(arm, request), seed)
    after = await read_drafts(metrics) if metrics else None
    return to_run(outcome, between(before, after) if before and after else None)


async def _load(load: Load, asks: Sequence[Ask], send: Send, seed: int) -> Outcome:
    if load.concurrency:
        return await run_closed(asks, load.concurrency, send, time.perf_counter)
    offsets = arrival_times(len(asks), load.rate, load.burstiness, Random(f"arrivals/{seed}"))
    return await run_open(asks, offsets, send, time.perf_counter)


def _sender(arm: Arm, request: Request) -> Send:
    # A tenant for each run: no prompt is met with a prefix that the other arm's run has cached.
    tenant = f"bench.{secrets.token_hex(8)}"

    async def send(ask: Ask, sample: Sample) -> None:
        generation = arm.endpoint.client.generate(
            ask.prompt,
            mode=request.mode,
            deadline_s=request.deadline_s,
            temperature=request.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=request.ignore_eos or None,
            max_draft_tokens=arm.max_draft_tokens,
            tenant=tenant,
        )
        async with generation:
            async for part in generation:
                if part.token_ids:
                    sample.outputs.append((time.perf_counter(), len(part.token_ids)))
        sample.token_ids, sample.prompt_ids = generation.token_ids, generation.prompt_token_ids
        usage = generation.result.usage
        sample.rounds, sample.drafted, sample.accepted = usage.rounds, usage.drafted_tokens, usage.accepted_tokens

    return send
