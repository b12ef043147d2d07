"""Invariants 3, 4, 5, 7, 8 and 9 in process, on virtual time: the pair says what plain decoding says, whatever the drafters and links do.

Everything is float64 and compared token for token with `tests.support.oracle`, which decodes one request at a time with the attention of
`transformers` itself.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from draft_service.composite import CompositeProposer
from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from draft_service.ngram import NgramProposer
from draft_service.proposer import Proposer
from draft_service.speculator import SpeculatorProposer
from shared.engine.block_allocator import BlockAllocator
from shared.sampling import Mode, SamplingParams
from tests.support.kv_oracle import assert_kv_matches_fresh_prefill
from tests.support.liars import GarbageDrafter, LyingProposer
from tests.support.oracle import PlainDecoder
from tests.support.tiny_models import noisy_copy, tiny_llama
from tests.support.tiny_speculators import trained_speculator
from tests.support.virtual_pair import Carrier, Clock, DrafterLike, Host, TimedRunner, VirtualPair, delay
from verifier_service.request import FinishReason, Request, Stopping

TARGET = tiny_llama()
SPECULATOR = trained_speculator(TARGET)
NOISY = noisy_copy(TARGET, 0.05, seed=1)
ORACLE = PlainDecoder(TARGET)
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)

SAMPLINGS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=8),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias=((3, 5.0), (9, -4.0))),
]


def make_drafter(kind: str, seed: int = 0, step_s: float = 0.002, num_blocks: int = 128) -> tuple[DrafterLike, Clock]:
    clock = Clock()
    if kind == "garbage":
        return GarbageDrafter(seed), clock

    def model(loaded, min_confidence: float = 0.0) -> Proposer:
        runner = TimedRunner(loaded, num_blocks, BLOCK_SIZE, clock, step_s)
        return DraftModel(runner, BlockAllocator(num_blocks, BLOCK_SIZE), max_step_tokens=16, min_confidence=min_confidence)

    proposers: dict[str, Callable[[], Proposer]] = {
        "perfect": lambda: model(TARGET),
        "noisy": lambda: model(NOISY),
        "doubting": lambda: model(NOISY, min_confidence=0.7),
        "ngram": lambda: NgramProposer(2, 4),
        "speculator": lambda: SpeculatorProposer(SPECULATOR, "tiny"),
        "ngram+model": lambda: CompositeProposer(NgramProposer(2, 4), model(NOISY)),
        "ngram+speculator": lambda: CompositeProposer(NgramProposer(2, 4), SpeculatorProposer(SPECULATOR, "tiny")),
        "lying": lambda: LyingProposer(model(TARGET), 0.35, TARGET.vocab_size, seed),
        "random": lambda: LyingProposer(model(TARGET), 1.0, TARGET.vocab_size * 2, seed),
    }
    return Drafter(proposers[kind](), 16, clock), clock


def flaky(seed: int, loss: float, duplicate: float, jitter_s: float) -> Carrier:
    """Loses, doubles and reorders."""
    draw = random.Random(seed)

    def carry(message: object) -> Sequence[float]:
        if draw.random() < loss:
            return ()
        copies = 2 if draw.random() < duplicate else 1
        return [0.001 + draw.random() * jitter_s for _ in range(copies)]

    return carry


@dataclass(frozen=True)
class DrafterPlan:
    kind: str
    seed: int
    delay_s: float
    loss: float
    jitter_s: float
    step_s: float
    killed_at: float | None
    frozen_at: float | None


drafter_plans = st.builds(
    DrafterPlan,
    kind=st.sampled_from(
        ["lying", "noisy", "perfect", "lying", "doubting", "ngram", "speculator", "ngram+model", "ngram+speculator", "random", "garbage"]
    ),
    seed=st.integers(0, 2**32),
    delay_s=st.sampled_from([0.0001, 0.002, 0.002, 0.02, 0.2]),
    loss=st.sampled_from([0.0, 0.0, 0.0, 0.1]),
    jitter_s=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
    step_s=st.sampled_from([0.001, 0.002, 0.01, 0.1]),
    killed_at=st.sampled_from([None, None, None, 0.07, 0.2, 0.4]),
    frozen_at=st.sampled_from([None, None, None, 0.07, 0.2, 0.4]),
)

requests = st.builds(
    lambda prompt, sampling, seed, max_tokens, min_tokens, eos, max_draft: (prompt, sampling, seed, max_tokens, min_tokens, eos, max_draft),
    prompt=st.lists(st.integers(0, 63), min_size=1, max_size=12),
    sampling=st.sampled_from(SAMPLINGS),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.sampled_from([20, 24, 16, 9, 1]),
    min_tokens=st.integers(0, 3),
    eos=st.sampled_from([frozenset(), frozenset(), frozenset({5, 17, 40})]),
    max_draft=st.sampled_from([7, 4, 4, 1, 0]),
)


def to_request(index: int, drawn, mode: Mode = Mode.COUPLED) -> Request:
    prompt, sampling, seed, max_tokens, min_tokens, eos, max_draft = drawn
    stopping = Stopping(max_tokens, min(min_tokens, max_tokens), eos)
    return Request(f"r{index}", tuple(prompt), sampling, stopping, seed, mode=mode, max_draft_tokens=max_draft)


def attach(pair: VirtualPair, plan: DrafterPlan) -> Host:
    drafter, clock = make_drafter(plan.kind, plan.seed, plan.step_s)
    is_flaky = plan.loss or plan.jitter_s
    there, back = (flaky(plan.seed + side, plan.loss, plan.loss, plan.jitter_s) if is_flaky else delay(plan.delay_s) for side in (0, 1))
    asks = plan.kind.endswith("speculator")
    host = pair.attach(drafter, clock, name=plan.kind, wants_hidden_state=asks, to_drafter=there, to_verifier=back)
    if plan.killed_at is not None:
        pair.at(plan.killed_at, lambda: pair.kill(host))
    if plan.frozen_at is not None:
        pair.at(plan.frozen_at, lambda: pair.freeze(host))
    return host


def check_after_step(pair: VirtualPair) -> None:
    pair.engine.check_integrity()
    assert pair.allocator.num_free + pair.allocator.num_used == pair.allocator.num_blocks
    for generation in pair.engine.live:
        sequence = generation.sequence
        if generation.num_pending == 1:
            assert sequence.kv_len == len(sequence.token_ids) - 1
        if (len(pair.outputs) + generation.number) % 5 == 0:  # a fifth of the sequences each step: the oracle is the costly part
            assert_kv_matches_fresh_prefill(pair.runner, sequence)


@settings(max_examples=80)
@given(
    drawn=st.lists(requests, min_size=1, max_size=4),
    plans=st.lists(drafter_plans, min_size=1, max_size=3),
    late=st.none() | drafter_plans,
    max_draft_tokens=st.sampled_from([4, 7, 2, 0]),
    run_ahead=st.sampled_from([0, 3, 12]),
    num_blocks=st.sampled_from([64, 16, 10]),
    max_step_tokens=st.sampled_from([8, 64]),
    scorer=st.sampled_from(["expanded", "multi_query"]),
)
def test_output_is_that_of_plain_decoding_whatever_drafters_and_links_do(
    drawn, plans, late, max_draft_tokens, run_ahead, num_blocks, max_step_tokens, scorer
):
    pair = VirtualPair(
        TARGET,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_draft_tokens=max_draft_tokens,
        window=max_draft_tokens + run_ahead,
        max_step_tokens=max_step_tokens,
        scorer=scorer,
    )
    pair.on_step = lambda: check_after_step(pair)
    for plan in plans:
        attach(pair, plan)
    if late is not None:
        pair.at(0.15, lambda: attach(pair, late))
    asked = [to_request(index, request) for index, request in enumerate(drawn)]
    outputs = pair.run(*asked)
    assert outputs == {request.request_id: ORACLE.tokens(request) for request in asked}
    assert pair.allocator.num_free == num_blocks
    event(f"accepted guesses: {any(emission.accepted for emission in pair.emissions)}")
    event(f"rejected guesses: {any(emission.accepted < emission.drafted for emission in pair.emissions)}")
    event(f"preempted: {any(output.stats.preempted for output in pair.outputs)}")


def test_that_very_test_would_notice_a_wrong_token():
    """Negative control: with the noise of another seed the comparison fails."""
    request = Request("r0", (1, 2, 3), SamplingParams(), Stopping(16), seed=1)
    other = Request("r0", (1, 2, 3), SamplingParams(), Stopping(16), seed=2)
    assert VirtualPair(TARGET).run(request)["r0"] != ORACLE.tokens(other)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scorer", ["expanded", "multi_query"])
@pytest.mark.parametrize("window", [4, 8], ids=["in step", "ahead"])
def test_a_draft_equal_to_the_target_is_always_right(sampling, scorer, window):
    """In step all guesses of a round are used up by its commit: the draft has no KV of the last one, nor of the token after it."""
    pair = VirtualPair(TARGET, scorer=scorer, window=window)
    pair.attach(*make_drafter("perfect"))
    pair.run(*(Request(f"r{i}", (i, 2, 3), sampling, Stopping(40), seed=i, max_draft_tokens=4) for i in range(4)))
    assert sum(emission.drafted for emission in pair.emissions) > 80
    assert all(emission.accepted == emission.drafted for emission in pair.emissions)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_a_draft_equal_to_the_target_stays_right_after_preemption_and_reattachment(sampling):
    """12 blocks for four sequences of up to 10 blocks each: they preempt each other; the drafter is replaced in the middle."""
    pair = VirtualPair(TARGET, num_blocks=12)
    first = pair.attach(*make_drafter("perfect"), to_drafter=delay(0.004), to_verifier=delay(0.004))
    pair.at(0.4, lambda: pair.kill(first))
    pair.at(0.45, lambda: pair.attach(*make_drafter("perfect")))
    asked = [Request(f"r{i}", (i, 2, 3), sampling, Stopping(36), seed=i, max_draft_tokens=4) for i in range(4)]
    assert pair.run(*asked) == {request.request_id: ORACLE.tokens(request) for request in asked}
    assert sum(output.stats.preempted for output in pair.outputs) > 0
    assert len({emission.request_id for emission in pair.emissions if emission.accepted}) == 4
    assert all(emission.accepted == emission.drafted for emission in pair.emissions)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_after_forced_rejections_a_draft_equal_to_the_target_is_right_again(sampling):
    """Of guesses that follow only accepted ones, just the lies are rejected: the draft's KV has no trace of earlier lies."""
    clock = Clock()
    model = DraftModel(TimedRunner(TARGET, 128, BLOCK_SIZE, clock, 0.002), BlockAllocator(128, BLOCK_SIZE))
    liar = LyingProposer(model, 0.35, TARGET.vocab_size, seed=3)
    pair = VirtualPair(TARGET, window=4)  # no running ahead: what a lie spoils is never sent, so every rejection is of a lie itself
    pair.attach(Drafter(liar, 16, clock), clock)
    asked = [Request(f"r{i}", (i, 2, 3), sampling, Stopping(48), seed=i, max_draft_tokens=4) for i in range(3)]
    assert pair.run(*asked) == {request.request_id: ORACLE.tokens(request) for request in asked}
    drafted, accepted = (sum(getattr(emission, name) for emission in pair.emissions) for name in ("drafted", "accepted"))
    assert 0.3 < accepted / drafted < 0.7
    length = dict.fromkeys(pair.text, 3)
    for emission in pair.emissions:
        rejected_at = length[emission.request_id] + emission.accepted
        if emission.accepted < emission.drafted:
            assert (int(emission.request_id[1:]) + 1, rejected_at) in liar.lies
        length[emission.request_id] += len(emission.token_ids)
    pair.drain()
    assert model.stats.used_blocks == 0


@pytest.mark.parametrize("kind", ["perfect", "noisy", "doubting", "lying", "ngram", "speculator", "ngram+model", "ngram+speculator"])
def test_output_does_not_depend_on_the_company(kind):
    """Alone, in a batch, in another place of the batch, with other seeds beside it."""
    request = Request("it", (9, 8, 7, 9, 8), SamplingParams(temperature=0.8), Stopping(24), seed=11, max_draft_tokens=4)
    texts = []
    for others in ([], [21], [21, 22, 23], [31, 32, 33, 34, 35]):
        pair = VirtualPair(TARGET)
        pair.attach(*make_drafter(kind))
        company = [Request(f"o{seed}", (seed, 1), SamplingParams(), Stopping(30), seed=seed, max_draft_tokens=3) for seed in others]
        place = len(company) // 2
        texts.append(pair.run(*company[:place], request, *company[place:])["it"])
    assert all(text == ORACLE.tokens(request) for text in texts)


def test_resumed_generation_continues_the_same_text():
    whole = Request("whole", (4, 5, 6), SamplingParams(), Stopping(30), seed=5, max_draft_tokens=4)
    text = VirtualPair(TARGET).run(whole)["whole"]
    for cut in (1, 7, 29):
        rest = Request("rest", (4, 5, 6), SamplingParams(), Stopping(30), seed=5, resume_ids=tuple(text[:cut]), max_draft_tokens=4)
        pair = VirtualPair(TARGET)
        pair.attach(*make_drafter("noisy"))
        assert pair.run(rest)["rest"] == text[cut:]


def test_stop_tokens_take_effect_inside_an_accepted_run():
    plain = Request("r", (1, 2, 3), GREEDY, Stopping(30), seed=0)
    text = ORACLE.tokens(plain)
    stop_id = text[9]
    stopping = Stopping(30, stop_ids=frozenset({stop_id}))
    pair = VirtualPair(TARGET, max_draft_tokens=7, window=16)
    pair.attach(*make_drafter("perfect"))
    out = pair.run(Request("r", (1, 2, 3), GREEDY, stopping, seed=0, max_draft_tokens=7))["r"]
    assert out == text[: text.index(stop_id) + 1]
    last = pair.finished["r"]
    assert (last.finish, last.matched_id) == (FinishReason.STOP_TOKEN, stop_id)
    assert last.accepted <= last.drafted <= len(last.token_ids)


def test_a_cancelled_request_frees_its_blocks_at_once_and_nobody_else_notices():
    asked = [Request(f"r{i}", (i, 2, 3), SamplingParams(), Stopping(30), seed=i, max_draft_tokens=4) for i in range(3)]
    for step in range(1, 12):
        pair = VirtualPair(TARGET)
        pair.attach(*make_drafter("noisy"))
        pair.at_step(step, lambda pair=pair: pair.cancel("r1"))
        pair.run(*asked)
        assert pair.text["r0"] == ORACLE.tokens(asked[0])
        assert pair.text["r2"] == ORACLE.tokens(asked[2])
        assert pair.allocator.num_free == pair.allocator.num_blocks
