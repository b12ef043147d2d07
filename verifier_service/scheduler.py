"""Which live requests enter a step and how many of their tokens. It owns the KV blocks and knows no model and no link.

Running requests come first, in order of arrival: those that decode with their guesses, then those that still prefill share
what is left of the token budget in chunks. When blocks run out guesses are given up first, then the youngest running
request is preempted: its blocks go, its tokens stay, and it is computed again later. Nobody outside notices.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shared.engine.block_allocator import BlockAllocator
from shared.errors import OutOfBlocks
from verifier_service.generation import Generation


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

    def __iter__(self) -> Iterator[Generation]:
        """All live requests, running ones first."""
        return iter([*self._running, *self._waiting])

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
        budget = self._limits.max_step_tokens
        plan: dict[int, Scheduled] = {}
        for decoding in (True, False):
            for generation in list(self._running):
                if generation not in self._running or (generation.num_pending == 1) is not decoding or budget == 0:
                    continue
                part = self._reserve(generation, budget, plan)
                if part is not None:
                    plan[generation.number] = part
                    budget -= part.num_tokens + part.num_guesses
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_running and self._admit_next():
            newest = self._running[-1]
            part = self._reserve(newest, budget, plan)
            if part is None:
                break
            plan[newest.number] = part
            budget -= part.num_tokens + part.num_guesses
        return list(plan.values())

    def _admit_next(self) -> bool:
        # A request enters when its whole text fits beside the others: a chunk that fits would only be preempted later.
        needed = self._allocator.blocks_for(len(self._waiting[0].committed) + 1)
        if self._running and needed > self._allocator.num_free:
            return False
        self._running.append(self._waiting.popleft())
        return True

    def _reserve(self, generation: Generation, budget: int, plan: dict[int, Scheduled]) -> Scheduled | None:
        num_tokens = min(generation.num_pending, budget)
        num_guesses = 0
        if generation.num_pending == 1:
            num_guesses = min(len(generation.guesses), self.max_guesses(generation), budget - 1)
        while True:
            try:  # the whole text at once, also while it prefills in chunks: see _admit_next
                generation.sequence.reserve(len(generation.committed) + num_guesses, self._allocator)
            except OutOfBlocks:
                if num_guesses:
                    num_guesses = 0  # guesses are given up before anyone is preempted
                elif self._preempt_youngest(plan) is generation:
                    return None
            else:
                return Scheduled(generation, num_tokens, num_guesses)

    def _preempt_youngest(self, plan: dict[int, Scheduled]) -> Generation:
        youngest = self._running.pop()
        youngest.sequence.release(self._allocator)
        plan.pop(youngest.number, None)
        self._waiting.appendleft(youngest)
        self.num_preempted += 1
        return youngest
