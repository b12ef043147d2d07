import dataclasses

import pytest

from shared.link import ProposalBatch, StepBatch
from shared.sampling import Mode
from tests.support.drafting import begin, commit, drafter_of, proposals_of, run
from tests.support.proposers import RuleProposer, count_up


class Doubter(RuleProposer):
    """Counts up, and doubts every token that ends in 5."""

    def propose(self, requests):
        return [[dataclasses.replace(guess, is_doubted=guess.token_id % 10 == 5) for guess in guesses] for guesses in super().propose(requests)]


def test_after_a_doubted_guess_a_sequence_rests_while_others_go_on_and_the_verifier_is_told():
    drafter = drafter_of(Doubter(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 3)), begin(2, (1, 6)))))
    frames = run(drafter)
    assert [[proposal.token_ids for proposal in frame.proposals] for frame in frames] == [[(4,), (7,)], [(5,), (8,)], [(9,)], [(10,)]]
    assert [(frame.resting, frame.idle) for frame in frames] == [((), False), ((1,), False), ((), False), ((), True)]
    assert (drafter.stats.guesses_doubted.total(), drafter.stats.rests) == (1, 1)


def test_a_commit_that_leaves_the_doubted_guess_is_answered_by_the_same_word_without_asking_the_proposer():
    proposer = Doubter(count_up)
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 3)),)))
    run(drafter)
    proposer.asked.clear()
    drafter.apply(StepBatch(2, commits=(commit(1, 2, (4,)),)))
    assert run(drafter) == [ProposalBatch(2, 0.0, (), idle=True, resting=(1,))]
    assert proposer.asked == []


@pytest.mark.parametrize(("token_ids", "rest"), [((4, 5), [6, 7, 8, 9]), ((4, 7), [8, 9, 10, 11]), ((4, 5, 8), [9, 10, 11, 12])])
def test_drafting_goes_on_once_the_doubted_guess_is_committed_or_gone(token_ids, rest):
    drafter = drafter_of(Doubter(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 3)),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 2, token_ids),)))
    frames = run(drafter)
    assert [token_id for proposal in proposals_of(frames) for token_id in proposal.token_ids] == rest
    assert not any(frame.resting for frame in frames)


def test_a_rewind_goes_on_from_the_committed_tokens_whatever_was_doubted():
    drafter = drafter_of(Doubter(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 3)),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 2, (), rewind=True),)))
    assert [proposal.token_ids for proposal in proposals_of(run(drafter))] == [(4,), (5,)]


def test_in_rejection_mode_doubt_stops_nothing():
    """A stop that depends on a drawn token biases what is accepted (the negative control of the ratio test)."""
    drafter = drafter_of(Doubter(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 3), mode=Mode.REJECTION),)))
    frames = run(drafter)
    assert [proposal.token_ids for proposal in proposals_of(frames)] == [(4,), (5,), (6,), (7,)]
    assert not any(frame.resting for frame in frames)
    assert drafter.stats.rests == 0
