"""Which live requests enter a step and how many of their tokens. It owns the KV blocks and knows no model and no link.

The tokens of a step: every request that decodes gets its one; prompts get up to `max_prefill_tokens`, but only a quarter of that while somebody
decodes, the first in rank first; guesses get what is left, dealt out by `Allot`. So neither long prompts nor guesses hold up anybody's tokens.

Rank: requests that were overtaken too often, then by priority, then the older ones. Guesses get only blocks that nobody else needs, and for
one step. When blocks run out cached ones go first, then the request of the lowest rank: its blocks go, its tokens stay, and it is computed
again later, from what is still cached of it. Nobody outside notices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.engine.block_allocator import BlockAllocator
from shared.engine.prefix_cache import PrefixCache
from shared.errors import OutOfBlocks
from verifier_service.generation import Generation
from verifier_service.tenants import Tenants
from verifier_service.waiting import Waiting

_PREFILL_SHARE = 4  # beside requests that decode, prompts get one part in so many
_OUTPUT_WEIGHT = 2  # what a generated token counts beside one of a prompt, in the service that a tenant has had

# Given the requests that decode in the step, the tokens left for guesses and the tokens already in the step: guesses for each request.
# More than `Generation.num_usable` is cut to it.
Allot = Callable[[Sequence[Generation], int, int], Sequence[int]]


def deal_evenly(decoding: Sequence[Generation], budget: int, num_planned: int) -> list[int]:
    """Deals out `budget` guesses one by one, in turn, to those that still have some.

    Args:
        decoding: requests that decode in the step.
        budget: tokens left for guesses.
        num_planned: tokens already in the step; of no interest here.
    """
    del num_planned
    wanted = [generation.num_usable for generation in decoding]
    dealt = [0] * len(wanted)
    while budget > 0 and (unserved := [index for index, most in enumerate(wanted) if dealt[index] < most]):
        for index in unserved[:budget]:
            dealt[index] += 1
        budget -= len(unserved[:budget])
    return dealt


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
        max_prefill_tokens: tokens of prompts in one step, a quarter of it beside requests that decode; 0 is max_step_tokens.
        max_overtaken: how often those of higher priority, or of tenants with less service, may go before a request; see `Waiting`.
        prefix_cache: whether blocks are used again by requests that begin alike.
    """

    max_running: int
    max_step_tokens: int
    max_draft_tokens: int
    max_prefill_tokens: int = 0
    max_overtaken: int = 128
    prefix_cache: bool = True


class Scheduler:
    """The waiting and the running requests, and their blocks.

    Args:
        allocator: the pool's books.
        limits: what a step may hold.
        allot: decides how many guesses of each request a step scores.
    """

    def __init__(self, allocator: BlockAllocator, limits: SchedulerLimits, allot: Allot = deal_evenly) -> None:
        self._allocator = allocator
        self._limits = limits
        # Whoever decodes gets a token in every step, so no more may run than a step holds.
        self._max_running = min(limits.max_running, limits.max_step_tokens)
        self._max_prefill = limits.max_prefill_tokens or limits.max_step_tokens
        self._allot = allot
        self._tenants = Tenants()
        self._waiting = Waiting(self._tenants, limits.max_overtaken)
        self._running: dict[int, Generation] = {}
        self._cache = PrefixCache(allocator, limits.prefix_cache)
        self.num_preempted = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0

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
        """Requests that hold blocks, in the order in which they began."""
        return list(self._running.values())

    def add(self, generation: Generation) -> None:
        """Queues a request."""
        self._tenants.join(generation.request.tenant)
        self._waiting.add(generation)

    def remove(self, generation: Generation) -> None:
        """Takes a request out, wherever it is, and lets its blocks go."""
        if self._running.pop(generation.number, None) is not None:
            self._release(generation)
        else:
            self._waiting.remove(generation)
        self._tenants.leave(generation.request.tenant)

    def schedule(self) -> list[Scheduled]:
        """Plans a step and reserves its blocks; empty when there is nothing to run."""
        plan: dict[int, Scheduled] = {}
        decoding = [generation for generation in self._running.values() if generation.num_pending == 1]
        for generation in self._running.values():
            generation.sequence.trim(len(generation.committed), self._allocator)  # what the last step's guesses had
            self._keep(generation)
        for generation in decoding:
            self._plan(generation, 1, plan)
        budget = self._limits.max_step_tokens - len(plan)
        self._plan_prompts(min(budget, max(1, self._max_prefill // _PREFILL_SHARE) if plan else self._max_prefill), plan)
        self._plan_guesses([generation for generation in decoding if generation.number in plan], plan)
        return list(plan.values())

    def check_integrity(self, live: Sequence[Generation]) -> None:
        """Checks that held, cached and free blocks are all blocks, each counted once, and that nothing is kept that may change.

        Raises:
            BrokenInvariant: the text says which does not hold.
        """
        self._allocator.check_integrity([generation.sequence.block_table for generation in live])
        self._cache.check_integrity([generation.sequence for generation in live])

    def _plan_prompts(self, budget: int, plan: dict[int, Scheduled]) -> None:
        unfinished = sorted((one for one in self._running.values() if one.number not in plan), key=self._rank, reverse=True)
        while budget > 0:
            newcomer = self._waiting.next() if len(self._running) < self._max_running else None
            if newcomer is not None and (not unfinished or self._rank(newcomer)[:2] > self._rank(unfinished[0])[:2]) and self._admit(newcomer):
                for late in unfinished:
                    late.overtaken += 1
                generation = newcomer
            elif unfinished:
                generation = unfinished.pop(0)
            else:
                return
            budget -= self._plan(generation, min(generation.num_pending, budget), plan)

    def _plan_guesses(self, decoding: Sequence[Generation], plan: dict[int, Scheduled]) -> None:
        num_planned = sum(part.num_tokens for part in plan.values())
        budget = self._limits.max_step_tokens - num_planned
        for generation, allotted in zip(decoding, self._allot(decoding, budget, num_planned), strict=True):
            sequence = generation.sequence
            num_slots = (len(sequence.block_table) + self._allocator.num_free) * self._allocator.block_size - len(generation.committed)
            amount = min(allotted, generation.num_usable, self._limits.max_draft_tokens, budget, num_slots)
            if amount > 0:
                sequence.reserve(len(generation.committed) + amount, self._allocator)
                plan[generation.number] = Scheduled(generation, 1, amount)
                budget -= amount

    def _plan(self, generation: Generation, num_tokens: int, plan: dict[int, Scheduled]) -> int:
        """Plans committed tokens of a running request; returns how many, 0 if it had to give way."""
        while generation.number in self._running:
            try:  # the whole text at once, also while it prefills in chunks: see _admit
                generation.sequence.reserve(len(generation.committed), self._allocator)
            except OutOfBlocks:
                self._preempt(min(self._running.values(), key=self._rank), plan)
            else:
                plan[generation.number] = Scheduled(generation, num_tokens, 0)
                self._charge(generation, generation.sequence.kv_len + num_tokens)
                return num_tokens
        return 0

    def _admit(self, generation: Generation) -> bool:
        """Lets a request run if its whole text fits beside the others: a chunk that fits would only be preempted later."""
        cached = self._cache.find(generation.sequence)
        num_missing = self._allocator.blocks_for(len(generation.committed) + 1) - sum(map(self._allocator.is_held, cached))
        if self._running and num_missing > self._allocator.num_free:
            return False
        self._waiting.take(generation)
        self._running[generation.number] = generation
        self._cache.take(generation.sequence, cached)
        generation.num_sound = generation.sequence.kv_len
        if generation.num_charged == 0:  # it begins; when it comes back, its prompt has been counted
            prompt_length = len(generation.request.prompt_ids)
            generation.num_cached = min(generation.sequence.kv_len, prompt_length)
            generation.num_charged = generation.sequence.kv_len
            self.num_queried_tokens += prompt_length
            self.num_cached_tokens += generation.num_cached
        return True

    def _preempt(self, generation: Generation, plan: dict[int, Scheduled]) -> None:
        del self._running[generation.number]
        self._release(generation)
        plan.pop(generation.number, None)
        self._waiting.add(generation)
        self.num_preempted += 1

    def _release(self, generation: Generation) -> None:
        self._keep(generation)
        generation.sequence.release(self._allocator)

    def _keep(self, generation: Generation) -> None:
        """Lets others use what no request has been seen to fail on. The rows of a prompt's chunk show nobody what they have left behind."""
        if generation.sequence.kv_len == generation.num_sound:
            self._cache.keep(generation.sequence)

    def _charge(self, generation: Generation, length: int) -> None:
        """Puts down the text up to `length` to the tenant's account, once: neither guesses nor what has to be computed again is its doing."""
        num_new = length - generation.num_charged
        if num_new > 0:
            num_output = min(num_new, max(0, length - len(generation.request.prompt_ids)))
            self._tenants.charge(generation.request.tenant, num_new + (_OUTPUT_WEIGHT - 1) * num_output)
            generation.num_charged = length

    def _rank(self, generation: Generation) -> tuple[bool, int, int]:
        return generation.overtaken >= self._limits.max_overtaken, generation.request.priority, -generation.number
