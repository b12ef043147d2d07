"""How much KV memory is held for nothing: slots of live sequences without a token, with the real scheduler and allocator and no model.

Requests of mixed lengths, lognormal between two bounds and half of each prompt, come as fast as they are served. In every step all slots that
running sequences hold are counted: those of a token of the text, those for guesses that the step scores (lookahead), and the rest, which is waste.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.link import Proposal
from shared.sampling import SamplingParams
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled, Scheduler, SchedulerLimits

_VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Load:
    """What is served.

    Args:
        num_requests: in all.
        k: guesses for each sequence in each step.
        min_length: of prompt and output together, in tokens.
        max_length: likewise.
        sigma: of the logarithm of lengths, whose median is the geometric mean of the bounds.
        acceptance: chance of each guess, 0..1.
    """

    num_requests: int
    k: int
    min_length: int = 32
    max_length: int = 2048
    sigma: float = 1.0
    acceptance: float = 0.7


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots that running sequences held, summed over all steps.

    Args:
        block_size: tokens per block.
        held: all.
        lookahead: of those, for guesses that the step scored.
        wasted: of those, for nothing.
        worst: the largest wasted share in a step with at least half as many sequences as there may be.
        num_steps: summed over.
        num_preempted: how often one had to give its blocks back.
    """

    block_size: int
    held: int
    lookahead: int
    wasted: int
    worst: float
    num_steps: int
    num_preempted: int


def measure(load: Load, limits: SchedulerLimits, num_blocks: int, block_size: int, seed: int = 0) -> Slots:
    """Serves the load, without a model."""
    rng = random.Random(seed)
    allocator = BlockAllocator(num_blocks, block_size)
    scheduler = Scheduler(allocator, limits)
    digests: dict[int, int] = {}
    for generation in _requests(rng, load):
        scheduler.add(generation)
        digests[generation.number] = extend(0, generation.committed)
    held = lookahead = wasted = num_steps = 0
    worst = 0.0
    while digests:
        for generation in scheduler.running:
            if generation.num_pending == 1:
                guesses = tuple(rng.randrange(_VOCAB_SIZE) for _ in range(load.k))
                generation.guesses.join(Proposal(generation.number, len(generation.committed), digests[generation.number], guesses), load.k, False)
        plan = scheduler.schedule()
        slots = sum(len(generation.sequence.block_table) for generation in scheduler.running) * block_size
        ahead = sum(part.num_guesses for part in plan)
        idle = slots - ahead - sum(len(generation.committed) for generation in scheduler.running)
        held, lookahead, wasted, num_steps = held + slots, lookahead + ahead, wasted + idle, num_steps + 1
        if scheduler.num_running >= limits.max_running // 2:
            worst = max(worst, idle / slots)
        for part in plan:
            _commit(part, rng, load.acceptance, digests, scheduler)
    return Slots(block_size, held, lookahead, wasted, worst, num_steps, scheduler.num_preempted)


def _requests(rng: random.Random, load: Load) -> Iterator[Generation]:
    median = math.sqrt(load.min_length * load.max_length)
    for number in range(1, load.num_requests + 1):
        length = round(min(load.max_length, max(load.min_length, rng.lognormvariate(math.log(median), load.sigma))))
        prompt = tuple(rng.randrange(_VOCAB_SIZE) for _ in range(length // 2))
        request = Request(f"r{number}", prompt, SamplingParams(), Stopping(length - len(prompt)), 1, max_draft_tokens=load.k)
        yield new_generation(number, request, _VOCAB_SIZE, 0, 0.0)


def _commit(part: Scheduled, rng: random.Random, acceptance: float, digests: dict[int, int], scheduler: Scheduler) -> None:
    """What the engine would do with a step's tokens."""
    generation = part.generation
    if not part.is_terminal:
        generation.sequence.kv_len += part.num_tokens
        return
    accepted = next((index for index in range(part.num_guesses) if rng.random() >= acceptance), part.num_guesses)
    new = [*generation.guesses.token_ids[:accepted], rng.randrange(_VOCAB_SIZE)]
    generation.sequence.kv_len = generation.num_sound = len(generation.committed) + accepted
    generation.committed.extend(new)
    generation.guesses.commit(new)
    generation.guesses.clear()
    digests[generation.number] = extend(digests[generation.number], new)
    if generation.num_generated >= generation.request.stopping.max_tokens:
        scheduler.remove(generation)
        del digests[generation.number]


def _table(rows: list[Slots], load: Load) -> Table:
    lengths = f"lengths {load.min_length}..{load.max_length}"
    table = Table(title=f"KV slots held by live sequences, {lengths}, {load.num_requests} requests, K = {load.k}")
    for column in ("tokens per block", "wasted", "worst step", "lookahead", "steps", "preemptions"):
        table.add_column(column, justify="right")
    for row in rows:
        shares = [f"{row.wasted / row.held:.2%}", f"{row.worst:.2%}", f"{row.lookahead / row.held:.2%}"]
        table.add_row(str(row.block_size), *shares, str(row.num_steps), str(row.num_preempted))
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--k", type=int, default=8, help="guesses for each sequence in each step")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16], help="tokens per block; the services' default is 16")
    parser.add_argument("--kv-tokens", type=int, default=1 << 15, help="tokens that the pool holds")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    load = Load(num_requests=arguments.requests, k=arguments.k)
    limits = SchedulerLimits(arguments.max_num_seqs, arguments.max_step_tokens, arguments.k)
    rows = [measure(load, limits, arguments.kv_tokens // size, size) for size in arguments.block_size]
    Console().print(_table(rows, load))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**vars(arguments), "load": asdict(load), "slots": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
