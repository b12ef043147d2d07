"""The scheduler under anything that may happen: arrivals, guesses, cancellations, too few blocks. `PaperEngine` has the rules of each step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.paper_engine import PaperEngine
from verifier_service.scheduler import SchedulerLimits

BLOCK_SIZE = 4
MAX_OVERTAKEN = 5
MAX_TOKENS = 9
PRIORITIES = (-100, 0, 100)
TENANTS = ("", "a", "b")


def bound(engine: PaperEngine, num_before: int) -> int:
    """Steps after which `num_before` requests have had all their tokens, whatever arrives meanwhile.

    The head of a line gets its turn after at most MAX_OVERTAKEN others and one of each other line; whoever has had to come back, at most all
    that run, may go before. A turn comes at the latest when all that run have ended, which takes each its prompt, at so many tokens a
    step as are for prompts, and its output.
    """
    turns = MAX_OVERTAKEN + len(PRIORITIES) * len(TENANTS) + engine.limits.max_running
    prompt_steps = -(-engine.max_len // max(1, (engine.limits.max_prefill_tokens or engine.limits.max_step_tokens) // 4))
    return num_before * turns * engine.limits.max_running * (prompt_steps + MAX_TOKENS)


def storm(engine: PaperEngine, priority: int) -> int:
    """Lets new requests pour in, each of a high priority and short, until those that were there before are done; returns the steps it took."""
    before = dict(engine.live)
    most = bound(engine, len(before))
    for step in range(most + 1):
        if not before.keys() & engine.live.keys():
            return step
        while engine.scheduler.num_waiting < 2 * engine.limits.max_running:
            engine.arrive((step % 3, 1, 2), 2, priority, TENANTS[step % len(TENANTS)])
        engine.step()
    raise AssertionError(f"after {most} steps {sorted(before.keys() & engine.live.keys())} are not done")


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 16),
        max_running=st.integers(1, 5),
        max_step_tokens=st.integers(2, 24),
        max_draft_tokens=st.integers(0, 6),
        max_prefill_tokens=st.sampled_from([0, 0, 1, 6]),
    )
    def start(self, num_blocks: int, max_running: int, max_step_tokens: int, max_draft_tokens: int, max_prefill_tokens: int) -> None:
        limits = SchedulerLimits(max_running, max_step_tokens, max_draft_tokens, max_prefill_tokens, MAX_OVERTAKEN)
        self.engine = PaperEngine(num_blocks, BLOCK_SIZE, limits)

    @rule(
        share=st.floats(0, 1),
        beginning=st.integers(0, 2),
        max_tokens=st.integers(1, MAX_TOKENS),
        priority=st.sampled_from(PRIORITIES),
        tenant=st.sampled_from(TENANTS),
    )
    def arrive(self, share: float, beginning: int, max_tokens: int, priority: int, tenant: str) -> None:
        length = max(1, round(share * (self.engine.max_len - 1)))  # up to all that the pool holds
        self.engine.arrive(tuple((beginning + position // 6) % 3 for position in range(length)), max_tokens, priority, tenant)

    @precondition(lambda self: self.engine.live)
    @rule(index=st.integers(0, 1000))
    def cancel(self, index: int) -> None:
        self.engine.cancel(list(self.engine.live.values())[index % len(self.engine.live)])

    @rule(num_guesses=st.integers(0, 8), accepted=st.integers(0, 8), times=st.integers(1, 6))
    def steps(self, num_guesses: int, accepted: int, times: int) -> None:
        for _ in range(times):
            self.engine.guess(num_guesses)
            self.engine.step(accepted)

    @precondition(lambda self: 0 < len(self.engine.live) < 4)
    @rule(priority=st.sampled_from(PRIORITIES))
    def storm(self, priority: int) -> None:
        storm(self.engine, priority)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        most = bound(self.engine, len(self.engine.live))
        for _ in range(most):
            if self.engine.live:
                self.engine.step()
        assert not self.engine.live
        assert self.engine.allocator.num_free == self.engine.allocator.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=25)


def _overwhelmed(max_overtaken: int) -> PaperEngine:
    engine = PaperEngine(8, BLOCK_SIZE, SchedulerLimits(2, 8, 4, max_overtaken=max_overtaken))
    for priority in (-100, -50):
        engine.arrive(tuple(range(20)), 6, priority)
    return engine


def test_the_lowest_priority_gets_through_while_higher_ones_pour_in():
    assert storm(_overwhelmed(MAX_OVERTAKEN), 100) > 0


def test_without_a_bound_on_overtaking_it_would_starve():
    """The negative control: the same requests, the same storm."""
    with pytest.raises(AssertionError, match="are not done"):
        storm(_overwhelmed(1_000_000), 100)


def test_beginnings_are_shared_while_everything_happens():
    """The machine's rules by hand: alike and unlike beginnings, two tenants, guesses right and wrong, too few blocks for all."""
    engine = PaperEngine(12, BLOCK_SIZE, SchedulerLimits(4, 16, 4, max_overtaken=MAX_OVERTAKEN))
    for index in range(40):
        engine.arrive((*[index % 2] * (5 + index % 9), 5), 20, tenant=TENANTS[index % 5 // 4])
        engine.guess(4)
        engine.step(accepted=index % 4)
    while engine.live:
        engine.guess(4)
        engine.step(accepted=2)
    assert engine.scheduler.num_cached_tokens > 0
    assert engine.scheduler.num_preempted > 0
