import dataclasses

import pytest
import torch

from shared.engine.model_loader import LoadedModel
from shared.link import Decline, ProposalBatch
from shared.sampling import Mode, SamplingParams
from tests.support.draft_rig import SAMPLED, VOCAB, Rig, begin, commit, decode
from tests.support.tiny_models import noisy_copy, tiny_llama


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_llama(VOCAB)


@pytest.fixture(scope="module")
def draft(target) -> LoadedModel:
    return noisy_copy(target, sigma=0.3, seed=1)


def test_out_of_blocks_declines_the_youngest_and_the_others_go_on(target):
    rig = Rig(target, num_blocks=6, block_size=4)
    rig.tell(begins=(begin(1, [1] * 7, window=6), begin(2, [2] * 7), begin(3, [3] * 7)))
    frames = rig.run()
    assert [frame for frame in frames if isinstance(frame, Decline)] == [Decline(3, "no KV blocks left")]
    assert [len(frame.proposals) for frame in frames if isinstance(frame, ProposalBatch)] == [3, 3, 2, 2, 1, 1]
    rig.tell(commits=(commit(1, 7, decode(target, [1] * 7, 6), window=6),))
    frames = rig.run()
    assert [frame for frame in frames if isinstance(frame, Decline)] == [Decline(2, "no KV blocks left")]
    assert sum(len(frame.proposals) for frame in frames if isinstance(frame, ProposalBatch)) == 6
    assert rig.proposer.stats.used_blocks == rig.allocator.num_used == 5


def test_a_prompt_that_can_never_fit_is_declined_before_anything_is_computed(target):
    rig = Rig(target, num_blocks=2, block_size=4)
    rig.tell(begins=(begin(1, [1] * 9),))
    assert "longer than the 8 tokens" in rig.run()[0].reason
    assert rig.runner.num_forwards == rig.allocator.num_used == 0


def test_a_text_longer_than_the_whole_pool_is_declined_itself_and_no_other(target):
    rig = Rig(target, num_blocks=16, block_size=4)
    rig.tell(begins=(begin(1, [1] * 65), *(begin(number, [number] * 5) for number in (2, 3, 4))))
    frames = rig.run()
    assert [frame.sequence for frame in frames if isinstance(frame, Decline)] == [1]
    assert [[proposal.sequence for proposal in frame.proposals] for frame in frames if isinstance(frame, ProposalBatch)] == [[2, 3, 4]] * 4


def test_a_text_that_outgrows_the_pool_is_declined_itself(target):
    rig = Rig(target, num_blocks=4, block_size=4)
    rig.tell(begins=(begin(1, [1] * 15, window=4), begin(2, [2], window=0)))
    assert len(rig.guesses()[1]) == 1, "there is no room for a second one, and none will ever come"
    rig.tell(commits=(commit(1, 15, [7, 8]), commit(2, 1, [3], 2)))
    frames = rig.run()
    assert [frame.sequence for frame in frames if isinstance(frame, Decline)] == [1]
    assert sum(len(frame.proposals) for frame in frames if isinstance(frame, ProposalBatch)) == 2


def test_no_guess_stands_beyond_the_draft_models_length_and_a_longer_text_is_declined(target):
    rig = Rig(dataclasses.replace(target, max_model_len=6))
    rig.tell(begins=(begin(1, [1, 2, 3], window=8),))
    guesses = rig.guesses()[1]
    assert guesses == decode(target, [1, 2, 3], 3)
    rig.tell(commits=(commit(1, 3, [*guesses, 5]),))
    (decline, batch) = rig.run()
    assert "longer than the 6 tokens" in decline.reason
    assert batch.idle
    assert rig.allocator.num_used == 0


def test_a_wider_draft_never_guesses_an_id_beyond_the_targets_tokenizer(target):
    rig = Rig(target, vocab=40)
    rig.tell(begins=tuple(begin(number, [number], 6, SAMPLED, seed=number) for number in range(8)))
    guesses = rig.guesses()
    assert max(max(tail) for tail in guesses.values()) < 40
    assert guesses == {number: decode(target, [number], 6, SAMPLED, seed=number, vocab=40) for number in range(8)}


def test_a_narrower_draft_bears_rules_about_ids_it_lacks_and_declines_a_text_with_one(target):
    rig = Rig(target, vocab=100)
    sampling = SamplingParams(temperature=1.0, logit_bias=((90, 5.0),), presence_penalty=1.0)
    rig.tell(begins=(begin(1, [1, 2], 4, sampling, suppressed_ids=(95,), suppressed_until=50), begin(2, [1, 99])))
    frames = rig.run()
    assert [frame.sequence for frame in frames if isinstance(frame, Decline)] == [2]
    assert sum(len(frame.proposals) for frame in frames if isinstance(frame, ProposalBatch)) == 4


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_no_guess_and_spoil_no_other_sequence(target, mode, bad):
    rig = Rig(target)

    def spoil(logits):
        logits[0, 5] = bad
        return logits

    rig.runner.spoil = spoil
    rig.tell(begins=(begin(1, [1, 2, 3], 1, SAMPLED, mode), begin(2, [4, 5, 6], 1, SAMPLED, mode)))
    assert list(rig.guesses()) == [2]
    assert rig.proposer.stats.unusable_rows == 1
    rig.runner.spoil = lambda logits: logits
    rig.tell(commits=(commit(1, 3, [7], 2),))
    assert len(rig.guesses()[1]) == 2


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_make_finite_logits_infinite_give_no_guess_and_spoil_no_other_sequence(mode, temperature):
    rig = Rig(tiny_llama(VOCAB, dtype=torch.float32))
    spoiling = SamplingParams(temperature=temperature, repetition_penalty=1e-42)
    positive = list(range(VOCAB))  # some of these have a positive logit, which the penalty divides
    rig.tell(begins=(begin(1, positive, 2, spoiling, mode), begin(2, [4, 5, 6], 2, SAMPLED, mode)))
    assert list(rig.guesses()) == [2]
    assert rig.proposer.stats.unusable_rows == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError(), AssertionError()])
def test_a_forward_that_fails_costs_its_sequences_their_guesses_and_nothing_else(target, error):
    rig = Rig(target)
    rig.tell(begins=(begin(1, [1, 2, 3]), begin(2, [4, 5, 6])))
    rig.run()

    def fail(logits):
        raise error

    rig.runner.spoil = fail
    rig.tell(commits=(commit(1, 3, [9]), commit(2, 3, [9])))
    frames = rig.run()
    assert [frame.sequence for frame in frames if isinstance(frame, Decline)] == [1, 2]
    assert frames[-1].idle
    assert rig.allocator.num_used == 0
    assert rig.drafter.stats.failures == 1
    rig.runner.spoil = lambda logits: logits
    rig.tell(begins=(begin(3, [1, 2, 3]),))
    assert rig.guesses() == {3: decode(target, [1, 2, 3], 4)}
