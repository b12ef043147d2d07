"""An engine without a model: it plans with the real scheduler, writes what a forward pass would write, and commits tokens.

What a block holds at a slot is the text up to there and whose it is. So whoever reads a block that was made for another text, for another tenant,
or with a guess that did not come true is found out, whatever path led there.
"""

from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.link import Proposal
from shared.sampling import SamplingParams
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled, Scheduler, SchedulerLimits

Slot = tuple[str, tuple[int, ...]]


class WatchedScheduler(Scheduler):
    """Checks every preemption when it happens."""

    def _preempt(self, generation: Generation, plan: dict[int, Scheduled]) -> None:
        ranks = {number: self._rank(running) for number, running in self._running.items()}
        assert ranks[generation.number] == min(ranks.values()), "somebody of higher rank is preempted for a lower one"
        assert not any(part.num_guesses for part in plan.values()), "somebody is preempted in a step that scores guesses"
        for running in self._running.values():
            assert len(running.sequence.block_table) <= self._allocator.blocks_for(len(running.committed)), "lookahead survives a preemption"
        super()._preempt(generation, plan)


class PaperEngine:
    def __init__(self, num_blocks: int, block_size: int, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.scheduler = WatchedScheduler(self.allocator, limits)
        self.live: dict[int, Generation] = {}
        self.num_arrived = 0
        self._memory: dict[tuple[int, int], Slot] = {}

    @property
    def max_len(self) -> int:
        return self.allocator.num_blocks * self.allocator.block_size

    def arrive(self, prompt: tuple[int, ...], max_tokens: int, priority: int = 0, tenant: str = "", max_draft_tokens: int = 8) -> Generation:
        self.num_arrived += 1
        max_tokens = min(max_tokens, self.max_len - len(prompt))
        request = Request(
            f"r{self.num_arrived}",
            prompt,
            SamplingParams(),
            Stopping(max_tokens),
            1,
            max_draft_tokens=max_draft_tokens,
            priority=priority,
            tenant=tenant,
        )
        made = self.live[self.num_arrived] = new_generation(self.num_arrived, request, 64, 0, 0.0)
        self.scheduler.add(made)
        return made

    def guess(self, count: int) -> None:
        """Everybody's drafter guesses."""
        for one in self.live.values():
            one.guesses.clear()
            one.guesses.join(Proposal(one.number, len(one.committed), extend(0, one.committed), (7,) * count), 64, False)

    def cancel(self, one: Generation) -> None:
        del self.live[one.number]
        self.scheduler.remove(one)

    def step(self, accepted: int = 0) -> list[Scheduled]:
        """One step, in which the target agrees with up to `accepted` guesses of each request."""
        decoding = {one.number for one in self.scheduler.running if one.num_pending == 1}
        plan = self.scheduler.schedule()
        assert bool(plan) == bool(self.live), "a step with live requests runs something"
        assert sum(part.num_tokens + part.num_guesses for part in plan) <= self.limits.max_step_tokens
        assert len(plan) <= self.scheduler.num_running <= min(self.limits.max_running, self.limits.max_step_tokens)
        running = {one.number for one in self.scheduler.running}
        prefill = sum(part.num_tokens for part in plan if part.generation.number not in decoding)
        most = self.limits.max_prefill_tokens or self.limits.max_step_tokens
        assert prefill <= (max(1, most // 4) if decoding & running else most)
        assert decoding & running <= {part.generation.number for part in plan}, "whoever decodes gets a token in every step"
        for part in plan:
            self._write(part)
        for part in plan:
            self._read(part)
        for part in plan:
            self._commit(part, accepted)
        self.scheduler.check_integrity(list(self.live.values()))
        return plan

    def _write(self, part: Scheduled) -> None:
        one = part.generation
        text = [*one.committed, *one.guesses.token_ids[: part.num_guesses]]
        for position in range(one.sequence.kv_len, one.sequence.kv_len + part.num_tokens + part.num_guesses):
            index, offset = divmod(position, self.allocator.block_size)
            block = one.sequence.block_table[index]
            holders = [other for other in self.live.values() if block in other.sequence.block_table]
            assert holders == [one], "a block of several sequences is never written to"
            self._memory[block, offset] = (one.request.tenant, tuple(text[: position + 1]))

    def _read(self, part: Scheduled) -> None:
        one = part.generation
        text = [*one.committed, *one.guesses.token_ids[: part.num_guesses]]
        for position in range(one.sequence.kv_len + part.num_tokens + part.num_guesses):
            index, offset = divmod(position, self.allocator.block_size)
            slot = self._memory[one.sequence.block_table[index], offset]
            assert slot == (one.request.tenant, tuple(text[: position + 1])), "what is read was made for this text and this tenant"

    def _commit(self, part: Scheduled, accepted: int) -> None:
        one = part.generation
        one.scheduled_before = True
        if not part.is_terminal:
            one.sequence.kv_len += part.num_tokens
            return
        num_accepted = min(accepted, part.num_guesses)
        new = [*one.guesses.token_ids[:num_accepted], len(one.committed) % 2]
        one.sequence.kv_len = one.num_sound = len(one.committed) + num_accepted
        one.committed.extend(new)
        one.guesses.commit(new)
        if one.num_generated >= one.request.stopping.max_tokens:
            self.cancel(one)
