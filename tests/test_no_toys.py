"""What a toy would not do, counted: one forward for a mixed batch, one draft forward per token, shared messages, guesses that ride ahead."""

from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from shared.engine.block_allocator import BlockAllocator
from shared.sampling import SamplingParams
from tests.support.tiny_models import noisy_copy, tiny_llama
from tests.support.virtual_pair import Clock, TimedRunner, VirtualPair, delay
from verifier_service.request import Request, Stopping

TARGET = tiny_llama()
GREEDY = SamplingParams(temperature=0.0)


def drafter_of(model, clock: Clock, step_s: float = 0.002) -> tuple[Drafter, TimedRunner]:
    runner = TimedRunner(model, 256, 4, clock, step_s)
    return Drafter(DraftModel(runner, BlockAllocator(256, 4)), 32, clock), runner


def ask(name: str, prompt_length: int, max_draft_tokens: int, max_tokens: int = 24) -> Request:
    return Request(name, tuple(range(1, prompt_length + 1)), GREEDY, Stopping(max_tokens), seed=1, max_draft_tokens=max_draft_tokens)


def test_a_step_that_prefills_decodes_and_verifies_is_one_forward():
    pair = VirtualPair(TARGET, max_step_tokens=16)
    clock = Clock()
    pair.attach(drafter_of(TARGET, clock)[0], clock)
    # A long prompt arrives while one request verifies guesses and another decodes plainly.
    pair.at(0.1, lambda: pair.submit(ask("long", 40, 4)))
    pair.run(ask("verifies", 3, 4), ask("plain", 5, 0))
    worked = [output.stats for output in pair.outputs if output.stats.decode_rows or output.stats.prefill_tokens]
    mixed = [stats for stats in worked if stats.prefill_tokens and stats.decode_rows > 2]
    assert mixed, "no step mixed the three kinds"
    assert len(pair.runner.calls) == len(worked)


def test_all_sequences_of_a_drafter_take_one_draft_forward_per_token():
    pair = VirtualPair(TARGET, max_draft_tokens=4, window=4)
    clock = Clock()
    drafter, runner = drafter_of(TARGET, clock)
    pair.attach(drafter, clock)
    pair.run(*(ask(f"r{i}", 3, 4) for i in range(8)))
    proposed = sum(len(proposal.token_ids) for batch in pair.proposal_batches for proposal in batch.proposals)
    num_batches = sum(1 for batch in pair.proposal_batches if batch.proposals)
    assert len(runner.calls) <= num_batches + 2  # the first forwards may only take in the prompts
    assert proposed >= 6 * num_batches  # eight sequences; some end earlier than others


def test_guesses_of_several_sequences_share_a_message():
    pair = VirtualPair(TARGET)
    clock = Clock()
    pair.attach(drafter_of(TARGET, clock)[0], clock)
    pair.run(*(ask(f"r{i}", 3, 4) for i in range(8)))
    sizes = [len(batch.proposals) for batch in pair.proposal_batches if batch.proposals]
    assert max(sizes) == 8
    assert sum(sizes) / len(sizes) > 4


def test_at_20_ms_round_trip_rounds_use_guesses_that_came_while_the_verifier_computed():
    pair = VirtualPair(TARGET, max_draft_tokens=8, window=32, step_s=0.030)
    clock = Clock()
    pair.attach(drafter_of(noisy_copy(TARGET, 0.02, seed=5), clock)[0], clock, to_drafter=delay(0.010), to_verifier=delay(0.010))
    pair.run(*(ask(f"r{i}", 3 + i, 8, max_tokens=60) for i in range(3)))
    rounds = [emission for emission in pair.emissions if emission.drafted]
    accepted, drafted = sum(emission.accepted for emission in rounds), sum(emission.drafted for emission in rounds)
    assert 0.5 < accepted / drafted < 1.0, "the setting is meant to have some misses"
    assert sum(emission.overlapped for emission in rounds) > 0.3 * len(rounds)


def test_without_running_ahead_hardly_any_round_does():
    """Negative control of the count above: a drafter that waits for each commit has nothing under way while the verifier computes."""
    pair = VirtualPair(TARGET, max_draft_tokens=2, window=2, step_s=0.030)
    clock = Clock()
    pair.attach(drafter_of(TARGET, clock)[0], clock, to_drafter=delay(0.001), to_verifier=delay(0.001))
    pair.run(ask("r", 3, 2, max_tokens=120))
    rounds = [emission for emission in pair.emissions if emission.drafted]
    # The first few do: until its turnaround is known nobody waits for it.
    assert 0 < sum(emission.overlapped for emission in rounds) <= 0.2 * len(rounds)


def test_run_ahead_makes_a_far_drafter_pay():
    """Virtual time: at 20 ms round trip and 30 ms steps, a perfect drafter more than doubles the speed of plain decoding."""
    plain = VirtualPair(TARGET, step_s=0.030)
    plain.run(ask("r", 3, 0, max_tokens=60))
    ahead = VirtualPair(TARGET, max_draft_tokens=8, window=32, step_s=0.030)
    clock = Clock()
    ahead.attach(drafter_of(TARGET, clock)[0], clock, to_drafter=delay(0.010), to_verifier=delay(0.010))
    ahead.run(ask("r", 3, 8, max_tokens=60))
    assert ahead.clock.now < plain.clock.now / 2


def test_a_drafter_far_away_costs_next_to_nothing():
    """Virtual time: 200 ms away, with guesses that are hardly ever right."""
    plain = VirtualPair(TARGET, step_s=0.030)
    plain.run(ask("r", 3, 0, max_tokens=60))
    far = VirtualPair(TARGET, max_draft_tokens=8, window=32, step_s=0.030)
    clock = Clock()
    far.attach(drafter_of(noisy_copy(TARGET, 1.0, seed=5), clock)[0], clock, to_drafter=delay(0.1), to_verifier=delay(0.1))
    far.run(ask("r", 3, 8, max_tokens=60))
    assert far.clock.now < plain.clock.now * 1.03
