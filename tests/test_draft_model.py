from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draft_service.draft_model import DraftModel
from draft_service.tail import DraftSequence
from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_loader import LoadedModel
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence
from shared.link import End, EndReason
from shared.noise import derive_key
from shared.sampling import Mode, SamplingParams
from tests.support.draft_rig import GREEDY, SAMPLED, VOCAB, Rig, begin, commit, decode
from tests.support.draws import draw
from tests.support.kv_oracle import assert_kv_matches_fresh_prefill
from tests.support.tiny_models import noisy_copy, tiny_llama


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_llama(VOCAB)


@pytest.fixture(scope="module")
def draft(target) -> LoadedModel:
    return noisy_copy(target, sigma=0.3, seed=1)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.7, top_k=8, repetition_penalty=1.3)], ids=["greedy", "T=1", "penalised"]
)
def test_coupled_guesses_are_what_plain_decoding_picks(target, sampling):
    rig = Rig(target)
    prompts = {1: [1, 2, 3], 2: [9, 8, 7, 6, 5, 4], 3: [30]}
    rig.tell(begins=tuple(begin(number, prompt, 6, sampling, seed=number) for number, prompt in prompts.items()))
    assert rig.guesses() == {number: decode(target, prompt, 6, sampling, seed=number) for number, prompt in prompts.items()}


def test_one_forward_per_token_serves_all_sequences_and_fills_one_batch(draft):
    rig = Rig(draft)
    rig.tell(begins=tuple(begin(number, [number, 2, 3], window=5) for number in range(6)))
    frames = rig.run()
    assert rig.runner.num_forwards == rig.proposer.stats.forwards == 5
    assert [len(frame.proposals) for frame in frames] == [6] * 5
    assert [frame.idle for frame in frames] == [False] * 4 + [True]
    assert rig.runner.fed == [[(0, 3)] * 6] + [[(position, 1)] * 6 for position in range(3, 7)]
    assert rig.proposer.stats.catch_up_tokens == 12


def test_all_accepted_plus_a_bonus_token_feeds_two_tokens(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], window=4),))
    tail = rig.guesses()[1]
    rig.runner.fed.clear()
    bonus = decode(target, [1, 2, 3, *tail], 1)
    rig.tell(commits=(commit(1, 3, tail + bonus, window=1),))
    assert rig.guesses() == {1: decode(target, [1, 2, 3, *tail, *bonus], 1)}
    # Positions 3 to 5 have KV; the last guess has none yet, and neither has the bonus token.
    assert rig.runner.fed == [[(6, 2)]]


def test_a_rejected_tail_rewinds_to_the_first_difference_and_no_further(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], window=4),))
    tail = rig.guesses()[1]
    rig.runner.fed.clear()
    other = (tail[1] + 1) % VOCAB
    rig.tell(commits=(commit(1, 3, [tail[0], other], window=1),))
    assert rig.guesses() == {1: decode(target, [1, 2, 3, tail[0], other], 1)}
    assert rig.runner.fed == [[(4, 1)]]


def test_commits_that_pile_up_behind_a_rejection_leave_no_trace_of_the_rejected_tail(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], window=4),))
    tail = rig.guesses()[1]
    rig.runner.fed.clear()
    other = (tail[1] + 1) % VOCAB
    rig.tell(commits=(commit(1, 3, [tail[0], other]),))
    rig.tell(commits=(commit(1, 5, [7], window=1),))
    assert rig.guesses() == {1: decode(target, [1, 2, 3, tail[0], other, 7], 1)}
    assert rig.runner.fed == [[(4, 2)]]


@pytest.mark.parametrize("num_missing", [1, 2, 3, 7, 20])
def test_any_number_of_missing_tokens_is_caught_up(target, num_missing):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], window=2),))
    rig.run()
    unforeseen = [(7 * index + 5) % VOCAB for index in range(num_missing)]
    rig.tell(commits=(commit(1, 3, unforeseen, window=3),))
    assert rig.guesses() == {1: decode(target, [1, 2, 3, *unforeseen], 3)}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
def test_a_rewind_brings_the_same_coupled_guesses_again(target, sampling):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], 4, sampling),))
    first = rig.guesses()[1]
    rig.tell(commits=(commit(1, 3, first[:1], 3, rewind=True),))
    assert rig.guesses() == {1: first[1:]}


def test_a_rewind_without_new_tokens_still_has_logits_to_guess_from(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3]),))
    first = rig.guesses()[1]
    rig.tell(commits=(commit(1, 3, [], rewind=True),))
    assert rig.guesses() == {1: first}


def test_a_long_prompt_is_fed_in_chunks_while_others_go_on(target):
    rig = Rig(target, budget=10)
    long = [(5 * index + 1) % VOCAB for index in range(40)]
    rig.tell(begins=(begin(1, long, window=2), begin(2, [1, 2, 3], window=6)))
    first, second = rig.drafter.step(), rig.drafter.step()
    assert [[proposal.sequence for proposal in frame.proposals] for frame in (*first, *second)] == [[2], [2]]
    assert rig.runner.fed == [[(0, 7), (0, 3)], [(7, 9), (3, 1)]]
    rest = rig.guesses()
    assert rest[1] == decode(target, long, 2)
    assert rest[2] == decode(target, [1, 2, 3], 6)[2:]
    assert max(sum(size for _, size in spans) for spans in rig.runner.fed) == 10


def test_a_long_prompt_gets_a_small_share_of_a_pass_beside_sequences_that_are_ready_and_all_of_one_without(target):
    rig = Rig(target, budget=100, beside=6)
    long = [(5 * index + 1) % VOCAB for index in range(90)]
    rig.tell(begins=(begin(2, [1, 2, 3], window=2), begin(3, [4], window=2), begin(1, long, window=1)))
    guesses = rig.guesses()
    assert rig.runner.fed == [[(0, 3), (0, 1), (0, 7)], [(3, 1), (1, 1), (7, 7)], [(14, 76)]]
    assert guesses == {1: decode(target, long, 1), 2: decode(target, [1, 2, 3], 2), 3: decode(target, [4], 2)}


def test_more_sequences_than_the_budget_still_all_go_on(target):
    rig = Rig(target, budget=2)
    rig.tell(begins=tuple(begin(number, [number], window=1) for number in range(5)))
    assert rig.guesses() == {number: decode(target, [number], 1) for number in range(5)}
    assert rig.runner.num_forwards == 1


def test_rejection_guesses_are_drawn_from_the_very_distribution_that_is_sent(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], 5, SamplingParams(temperature=0.8, top_k=5), Mode.REJECTION, seed=3), begin(2, [4], 3)))
    proposals = [proposal for frame in rig.run() for proposal in frame.proposals]
    certain = [proposal for proposal in proposals if proposal.sequence == 2]
    drawn = [proposal for proposal in proposals if proposal.sequence == 1]
    assert not any(proposal.distributions for proposal in certain)
    for proposal in drawn:
        (distribution,) = proposal.distributions
        assert len(distribution.token_ids) <= 5
        assert proposal.token_ids == (draw(distribution, derive_key(3, "guess", 0), proposal.start),)


def test_greedy_guesses_in_rejection_mode_are_certain(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], 4, GREEDY, Mode.REJECTION),))
    proposals = [proposal for frame in rig.run() for proposal in frame.proposals]
    assert [token_id for proposal in proposals for token_id in proposal.token_ids] == decode(target, [1, 2, 3], 4)
    assert not any(proposal.distributions for proposal in proposals)


def test_a_rewind_in_rejection_mode_draws_with_fresh_noise(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3], 1, SamplingParams(temperature=50.0), Mode.REJECTION, seed=3),))
    drawn = [rig.guesses()[1][0]]
    for _ in range(5):
        rig.tell(commits=(commit(1, 3, [], 1, rewind=True),))
        drawn += rig.guesses()[1]
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
def test_a_guess_the_model_is_not_sure_of_is_the_last_until_it_is_committed(target, sampling):
    sure, rig = Rig(target), Rig(target, min_confidence=0.25)
    begins = tuple(begin(number, [number, 2, 3], 6, sampling, seed=number) for number in range(8))
    for each in (sure, rig):
        each.tell(begins=begins)
    whole, guessed = sure.guesses(), rig.guesses()
    assert all(whole[number][: len(tail)] == tail for number, tail in guessed.items())
    short = {number: tail for number, tail in guessed.items() if len(tail) < 6}
    assert 0 < len(short) < 8
    assert rig.drafter.stats.guesses_doubted.total() >= len(short)
    number, tail = next(iter(short.items()))
    rig.runner.fed.clear()
    rig.tell(commits=(commit(number, 3, tail[:-1], 6),))
    assert rig.guesses() == {}
    assert rig.runner.fed == []
    rig.tell(commits=(commit(number, 3 + len(tail) - 1, tail[-1:], 6),))
    assert len(rig.guesses()[number]) > 0
    assert rig.runner.fed[0] == [(3 + len(tail) - 1, 1)], "nothing that was still valid is computed again"


def test_in_rejection_mode_nothing_but_the_drawn_tokens_depends_on_what_is_drawn(target):
    """Frames, their sizes, and what is fed when: the same whatever the draws are, and however unsure the model is of them."""

    def shapes(seed: int) -> tuple[list[Any], list[Any], set[tuple[int, ...]]]:
        rig = Rig(target, min_confidence=0.99)
        sampling = SamplingParams(temperature=2.0)
        rig.tell(begins=tuple(begin(number, [number, 2], 5, sampling, Mode.REJECTION, seed=100 * seed + number) for number in range(3)))
        frames = rig.run()
        sent = [[(each.sequence, each.start, len(each.token_ids), len(each.distributions)) for each in frame.proposals] for frame in frames]
        drawn = {tuple(each.token_ids[0] for frame in frames for each in frame.proposals)}
        return [(*shape, frame.idle, frame.resting) for shape, frame in zip(sent, frames, strict=True)], rig.runner.fed, drawn

    sent, fed, texts = shapes(0)
    for seed in range(1, 6):
        other_sent, other_fed, other_texts = shapes(seed)
        assert (other_sent, other_fed) == (sent, fed)
        texts |= other_texts
    assert len(texts) == 6


def test_an_end_and_a_lost_link_free_the_kv_at_once(target):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1] * 9), begin(2, [2] * 9)))
    rig.run()
    rig.tell(ends=(End(1, EndReason.CANCELLED),))
    assert rig.proposer.stats.used_blocks == rig.allocator.num_used == 3
    rig.drafter.reset()
    assert rig.proposer.stats.free_blocks == rig.allocator.num_free == 64
    rig.allocator.check_integrity([])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["agree", "differ", "beyond", "rewind", "step"]), st.sampled_from([0, 1]), st.integers(0, 5), st.integers(0, 4)),
    max_size=12,
)


PILED_UP = [("step", 0, 0, 4), ("step", 0, 0, 4), ("step", 0, 0, 4), ("differ", 0, 1, 4), ("beyond", 0, 2, 4)]


@settings(max_examples=40)
@example(actions=PILED_UP, temperature=0.0, budget=512)
@given(actions=ACTIONS, temperature=st.sampled_from([0.0, 1.0]), budget=st.sampled_from([3, 512]))
def test_kv_equals_a_fresh_prefill_and_guesses_equal_plain_picks_after_any_commits(draft, actions, temperature, budget):
    sampling = SamplingParams(temperature=temperature)
    runner, allocator = ModelRunner(draft, 64, 4), BlockAllocator(64, 4)
    proposer = DraftModel(runner, allocator, budget)
    sequences = [DraftSequence.of(begin(number, [number + 1, 2, 3], 4, sampling), VOCAB, 1_000) for number in (0, 1)]
    for sequence in sequences:
        proposer.open(sequence)

    def propose():
        requests = [(sequence, sequence.room) for sequence in sequences if sequence.room]
        for (sequence, _), guesses in zip(requests, proposer.propose(requests), strict=True):
            if guesses:
                text = sequence.committed + sequence.tail
                assert [guess.token_id for guess in guesses] == decode(draft, text, 1, sampling, prompt_length=3)
                sequence.extend(guess.token_id for guess in guesses)
        for sequence in sequences:
            assert_kv_matches_fresh_prefill(runner, proposer.cached(sequence))
            assert sequence.digest == extend(0, sequence.committed + sequence.tail)

    for action, which, count, window in [*actions, ("step", 0, 0, 4), ("step", 0, 0, 4)]:
        sequence = sequences[which]
        tail, base = list(sequence.tail), len(sequence.committed)
        if action == "agree":
            sequence.settle(commit(which, base, tail[:count], window))
        elif action == "differ" and count < len(tail):
            sequence.settle(commit(which, base, [*tail[:count], (tail[count] + 1) % VOCAB], window))
        elif action == "beyond":
            sequence.settle(commit(which, base, [*tail, *range(count)], window))
        elif action == "rewind":
            sequence.settle(commit(which, base, tail[:count], window, rewind=True))
        else:
            propose()
    tables = [proposer.cached(sequence).block_table for sequence in sequences]
    allocator.check_integrity(tables)


def test_the_cached_sequence_never_claims_more_than_the_text_has(draft):
    rig = Rig(draft)
    sequence = DraftSequence.of(begin(1, [1, 2, 3]), VOCAB, 1_000)
    rig.proposer.open(sequence)
    assert rig.proposer.cached(sequence) == Sequence([])
    ((guess,),) = rig.proposer.propose([(sequence, 4)])
    sequence.extend([guess.token_id])
    assert rig.proposer.cached(sequence).kv_len == len(sequence.committed)
