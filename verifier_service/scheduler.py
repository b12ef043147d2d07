"""Which live requests enter a step and how many of their tokens. It owns the KV blocks and knows no model and no link.

Every request that decodes gets its one token, then prompts get their chunks in order of arrival, at least a quarter of the step if
they need it, and what is left is dealt out to the guesses evenly: neither long prompts nor guesses hold up anybody's tokens. When blocks
run out guesses are given up first, then the youngest running request is preempted: its blocks go, its tokens stay, and it is computed
again later. Nobody outside notices.
"""

from collections import deque
from dataclasses import dataclass

from shared.engine.block_allocator import BlockAllocator
from shared.errors import OutOfBlocks
from verifier_service.generation import Generation

_PREFILL_SHARE = 4  # prompts get at least one part in so many of a step, guesses the rest


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step.

    Args:
        generation: whose.
        num_tokens: committed tokens without KV that run: 1 when decoding, a chunk when prefilling.
        num_guesses: guesses scored behind them; 0 while prefilling.
    """

    generation: Generation
    num_tokens: int
    num_guesses: int

    @property
    def is_terminal(self) -> bool:
        """Whether the last committed token runs, so that the next one can be picked."""
        return self.num_tokens == self.generation.num_pending


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold.

    Args:
        max_running: requests that hold blocks at once.
        max_step_tokens: tokens in one forward pass, at least 1.
        max_draft_tokens: guesses scored for one request in one step.
    """

    max_running: int
    max_step_tokens: int
    max_draft_tokens: int


class Scheduler:
    """The waiting and the running requests, and their blocks."""

    def __init__(self, allocator: BlockAllocator, limits: SchedulerLimits) -> None:
        self._allocator = allocator
        self._limits = limits
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def running(self) -> list[Generation]:
        """Requests that hold blocks, oldest first."""
        return self._running

    def add(self, generation: Generation) -> None:
        """Queues a request."""
        self._waiting.append(generation)

    def remove(self, generation: Generation) -> None:
        """Takes a request out, wherever it is, and frees its blocks."""
        if generation in self._running:
            self._running.remove(generation)
        else:
            self._waiting.remove(generation)
        generation.sequence.release(self._allocator)

    def max_guesses(self, generation: Generation) -> int:
        """Most guesses that the request could use in a step now."""
        return min(self._limits.max_draft_tokens, generation.request.max_draft_tokens, generation.room)

    def schedule(self) -> list[Scheduled]:
        """Plans a step and reserves its blocks; empty when there is nothing to run."""
        plan: dict[int, Scheduled] = {}
        decoding = [generation for generation in self._running if generation.num_pending == 1]
        for generation in decoding:
            self._plan(generation, 1, plan)
        wanted = {part.generation.number: self._wanted_guesses(part.generation) for part in plan.values()}
        budget = self._limits.max_step_tokens - len(plan)
        self._plan_prefill(max(budget - sum(wanted.values()), min(budget, self._limits.max_step_tokens // _PREFILL_SHARE)), plan)
        budget = self._limits.max_step_tokens - sum(part.num_tokens for part in plan.values())
        self._plan_guesses(_deal({number: wanted[number] for number in wanted if number in plan}, budget), plan)
        return list(plan.values())

    def _plan_prefill(self, budget: int, plan: dict[int, Scheduled]) -> None:
        for generation in [generation for generation in self._running if generation.number not in plan]:
            if budget > 0 and generation in self._running:
                budget -= self._plan(generation, min(generation.num_pending, budget), plan)
        while budget > 0 and self._waiting and len(self._running) < self._limits.max_running and self._admit_next():
            planned = self._plan(self._running[-1], min(self._running[-1].num_pending, budget), plan)
            if not planned:
                return
            budget -= planned

    def _plan(self, generation: Generation, num_tokens: int, plan: dict[int, Scheduled]) -> int:
        """Plans committed tokens of a running request; returns how many, 0 if it had to give way."""
        while generation in self._running:
            try:  # the whole text at once, also while it prefills in chunks: see _admit_next
                generation.sequence.reserve(len(generation.committed), self._allocator)
            except OutOfBlocks:
                self._preempt_youngest(plan)
            else:
                plan[generation.number] = Scheduled(generation, num_tokens, 0)
                return num_tokens
        return 0

    def _plan_guesses(self, amounts: dict[int, int], plan: dict[int, Scheduled]) -> None:
        for number, amount in amounts.items():
            part = plan[number]
            try:
                part.generation.sequence.reserve(len(part.generation.committed) + amount, self._allocator)
            except OutOfBlocks:
                continue  # guesses are given up before anyone is preempted
            plan[number] = Scheduled(part.generation, part.num_tokens, amount)

    def _wanted_guesses(self, generation: Generation) -> int:
        return min(len(generation.guesses), self.max_guesses(generation))

    def _admit_next(self) -> bool:
        # A request enters when its whole text fits beside the others: a chunk that fits would only be preempted later.
        needed = self._allocator.blocks_for(len(self._waiting[0].committed) + 1)
        if self._running and needed > self._allocator.num_free:
            return False
        self._running.append(self._waiting.popleft())
        return True

    def _preempt_youngest(self, plan: dict[int, Scheduled]) -> None:
        youngest = self._running.pop()
        youngest.sequence.release(self._allocator)
        plan.pop(youngest.number, None)
        self._waiting.appendleft(youngest)
        self.num_preempted += 1


def _deal(wanted: dict[int, int], budget: int) -> dict[int, int]:
    """Deals out `budget` one by one, in turn, to those that still want more."""
    dealt = dict.fromkeys(wanted, 0)
    while budget > 0 and (unserved := [number for number in wanted if dealt[number] < wanted[number]]):
        for number in unserved[:budget]:
            dealt[number] += 1
        budget -= len(unserved[:budget])
    return dealt
