import pytest

from draft_service.ngram import NgramProposer
from draft_service.tail import count_matching
from shared.digest import extend
from shared.errors import ProtocolViolation
from shared.link import Decline, End, EndReason, Proposal, ProposalBatch, Resync, StepBatch, Welcome
from shared.sampling import Mode
from tests.support.drafting import WELCOME, begin, commit, drafter_of, proposals_of, run
from tests.support.proposers import RuleProposer, count_up
from tests.support.virtual_pair import Clock


def test_guesses_of_all_sequences_travel_in_one_batch_and_are_asked_for_together():
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(7, begins=(begin(1), begin(2, (5, 6)))))
    (batch,) = drafter.step()
    assert batch.step == 7
    assert not batch.idle
    assert batch.proposals == (Proposal(1, 3, extend(0, [1, 2, 3]), (4,)), Proposal(2, 2, extend(0, [5, 6]), (7,)))
    assert proposer.asked == [[1, 2]]


def test_the_tail_runs_ahead_to_the_window_and_no_further():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, window=3),)))
    frames = run(drafter)
    assert [(proposal.start, proposal.token_ids) for proposal in proposals_of(frames)] == [(3, (4,)), (4, (5,)), (5, (6,))]
    assert [frame.idle for frame in frames] == [False, False, True]
    assert proposals_of(frames)[2].digest == extend(0, [1, 2, 3, 4, 5])


def test_a_commit_that_agrees_makes_room_and_nothing_is_sent_again():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (4, 5)),)))
    assert [(proposal.start, proposal.token_ids) for proposal in proposals_of(run(drafter))] == [(7, (8,)), (8, (9,))]
    assert (drafter.stats.guesses_sent, drafter.stats.guesses_matched, drafter.stats.guesses_dropped) == ({"rule": 6}, {"rule": 2}, {})


def test_a_common_prefix_is_counted_whatever_the_texts_are_kept_in():
    assert count_matching([1, 2, 3], (1, 2, 3, 4)) == 3
    assert count_matching((1, 2, 3), [1, 5, 3]) == 1
    assert count_matching([], (1,)) == 0


def test_at_the_first_difference_the_whole_tail_goes():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (4, 50)),)))
    (batch, *_) = drafter.step()
    assert batch.proposals == (Proposal(1, 5, extend(0, [1, 2, 3, 4, 50]), (51,)),)
    assert (drafter.stats.guesses_matched, drafter.stats.guesses_dropped) == ({"rule": 1}, {"rule": 3})
    assert drafter.stats.guesses_refuted == {"rule": 1}, "what came after the first difference was never put to the test"


def test_a_commit_beyond_the_tail_is_taken_whole():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, window=1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (4, 5, 6), window=1),)))
    assert proposals_of(run(drafter)) == [Proposal(1, 6, extend(0, [1, 2, 3, 4, 5, 6]), (7,))]
    assert drafter.stats.guesses_dropped.total() == drafter.stats.guesses_refuted.total() == 0


def test_a_repeated_commit_changes_nothing_and_a_merged_one_gives_its_new_part():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (4, 5)),)))
    run(drafter)
    drafter.apply(StepBatch(3, commits=(commit(1, 3, (4, 5)),)))
    drafter.apply(StepBatch(4, commits=(commit(1, 3, (4,), window=0, rewind=True),)))
    assert run(drafter) == [ProposalBatch(4, 0.0, (), idle=True)]
    drafter.apply(StepBatch(5, commits=(commit(1, 3, (4, 5, 6, 60)),)))
    assert proposals_of(drafter.step()) == [Proposal(1, 7, extend(0, [1, 2, 3, 4, 5, 6, 60]), (61,))]


def test_a_rewind_sends_the_tail_again_from_the_new_committed_length():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (4,), rewind=True),)))
    assert [(proposal.start, proposal.token_ids) for proposal in proposals_of(run(drafter))] == [(4, (5,)), (5, (6,)), (6, (7,)), (7, (8,))]


@pytest.mark.parametrize("bad", [commit(1, 4, (5,)), commit(1, 2, (9, 4)), commit(1, 1, (7,))], ids=["gap", "contradiction", "old contradiction"])
def test_a_lost_sequence_stops_and_asks_for_a_begin_once_a_second(bad):
    clock = Clock()
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer, clock=clock)
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(bad,)))
    assert run(drafter) == [Resync(1), ProposalBatch(2, 0.0, (), idle=True)]
    assert proposer.opened == []
    clock.now = 0.9
    drafter.apply(StepBatch(3, commits=(commit(1, 3, (4,)),)))
    assert run(drafter) == [ProposalBatch(3, 0.0, (), idle=True)]
    clock.now = 1.0
    drafter.apply(StepBatch(4, commits=(commit(1, 4, (5,)),)))
    assert run(drafter)[0] == Resync(1)
    drafter.apply(StepBatch(5, begins=(begin(1, (1, 2, 3, 4, 5)),)))
    assert proposals_of(run(drafter))[0] == Proposal(1, 5, extend(0, [1, 2, 3, 4, 5]), (6,))
    assert drafter.stats.resyncs == 2


def test_a_commit_for_an_unknown_sequence_asks_for_a_begin():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, commits=(commit(9, 3, (4,)),)))
    assert run(drafter)[0] == Resync(9)


def test_begins_beyond_capacity_are_declined_and_their_commits_ignored():
    drafter = drafter_of(RuleProposer(count_up), capacity=1)
    drafter.apply(StepBatch(1, begins=(begin(1), begin(2)), commits=(commit(2, 3, (4,)),)))
    frames = run(drafter)
    assert frames[0] == Decline(2, "at capacity")
    assert {proposal.sequence for proposal in proposals_of(frames)} == {1}
    assert not any(isinstance(frame, Resync) for frame in frames)
    assert (drafter.stats.declines, drafter.stats.sequences) == (1, 1)


def test_an_end_frees_its_room_for_a_begin_of_the_same_step_and_closes_at_once():
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer, capacity=1)
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    drafter.apply(StepBatch(2, begins=(begin(2),), ends=(End(1, EndReason.FINISHED),)))
    assert proposer.opened == [2]
    assert {proposal.sequence for proposal in proposals_of(run(drafter))} == {2}


def test_an_end_has_the_last_word_in_its_step():
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(begin(1),), commits=(commit(1, 3, (4,)),), ends=(End(1, EndReason.CANCELLED),)))
    assert proposals_of(run(drafter)) == []
    assert proposer.opened == []


def test_an_end_alone_is_not_answered():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, ends=(End(1, EndReason.FINISHED),)))
    assert not drafter.has_work


def test_a_second_begin_replaces_what_was_known():
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, begins=(begin(1, (20, 21), window=1),)))
    assert proposals_of(run(drafter)) == [Proposal(1, 2, extend(0, [20, 21]), (22,))]
    assert proposer.opened == [1]


@pytest.mark.parametrize(
    ("bad", "reason"), [(begin(1, ()), "without tokens"), (begin(1, (1_000,)), "no such token"), (begin(1, mode=Mode.REJECTION), "mode")]
)
def test_a_sequence_that_cannot_be_served_is_declined(bad, reason):
    proposer = RuleProposer(count_up, modes=(Mode.COUPLED,))
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(bad,)))
    decline, batch = run(drafter)
    assert decline.sequence == 1
    assert reason in decline.reason
    assert batch.idle
    assert proposer.opened == []


def test_a_sequence_given_up_while_proposing_is_declined_and_the_others_go_on():
    proposer = RuleProposer(count_up, limit=2)
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(begin(1), begin(2), begin(3), begin(4))))
    decline_4, decline_3, batch = drafter.step()
    assert (decline_4, decline_3) == (Decline(4, "no room"), Decline(3, "no room"))
    assert [proposal.sequence for proposal in batch.proposals] == [1, 2]
    assert proposer.opened == [1, 2]


def test_without_a_match_one_empty_idle_batch_tells_the_verifier_not_to_wait():
    drafter = drafter_of(NgramProposer())
    drafter.apply(StepBatch(3, begins=(begin(1),)))
    assert drafter.step() == [ProposalBatch(3, 0.0, (), idle=True, resting=(1,))]
    assert not drafter.has_work
    drafter.apply(StepBatch(4, commits=(commit(1, 3, (1, 2)),)))
    assert [proposal.token_ids for proposal in proposals_of(run(drafter))] == [(3, 1, 2), (3,)]


def test_each_call_of_the_proposer_is_told_with_its_time_and_nothing_else_is():
    clock, told = Clock(), []

    def slow(text, room):
        clock.now += 0.25
        return [text[-1] + 1]

    drafter = drafter_of(RuleProposer(slow), clock=clock, on_step=lambda *step: told.append(step))
    drafter.apply(StepBatch(1, begins=(begin(1, window=2),)))
    run(drafter)
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (), window=0),)))
    run(drafter)
    assert told == [(0.25, 0), (0.25, 0)]


def test_a_window_of_zero_stops_drafting_until_it_opens():
    drafter = drafter_of(RuleProposer(count_up))
    drafter.apply(StepBatch(1, begins=(begin(1, window=0),)))
    assert run(drafter) == [ProposalBatch(1, 0.0, (), idle=True)]
    drafter.apply(StepBatch(2, commits=(commit(1, 3, (), window=1),)))
    assert [proposal.start for proposal in proposals_of(run(drafter))] == [3]


def test_a_proposal_has_no_more_guesses_than_the_verifier_takes():
    drafter = drafter_of(NgramProposer(), welcome=Welcome(1_000, 2, 64, 1_000))
    drafter.apply(StepBatch(1, begins=(begin(1, (1, 2, 3, 4, 5, 6, 1, 2), window=5),)))
    assert [proposal.token_ids for proposal in proposals_of(run(drafter))] == [(3, 4), (5, 6), (1,)]


def test_no_guess_stands_beyond_the_targets_length():
    drafter = drafter_of(RuleProposer(count_up), welcome=Welcome(1_000, 3, 64, max_model_len=5))
    drafter.apply(StepBatch(1, begins=(begin(1, window=32),)))
    assert [proposal.start for proposal in proposals_of(run(drafter))] == [3, 4]


@pytest.mark.parametrize("is_told_more", [False, True], ids=["silence", "a commit per step"])
def test_a_long_catch_up_shows_signs_of_life_without_claiming_to_be_idle(is_told_more):
    clock = Clock()

    def slow(text, room):
        clock.now += 0.2
        return None if clock.now < 1.2 else [1]

    told = []
    drafter = drafter_of(RuleProposer(slow), clock=clock, on_step=lambda seconds, num_fed: told.append(seconds))
    drafter.apply(StepBatch(1, begins=(begin(1, window=1),)))
    frames = []
    for step in range(2, 8):
        frames += drafter.step()
        if is_told_more:
            drafter.apply(StepBatch(step, commits=(commit(1, 1 + step, (9,), window=1),)))
    empty, full = frames
    assert (empty.proposals, empty.idle) == ((), False)
    assert proposals_of([full])
    assert full.idle
    assert empty.draft_seconds + full.draft_seconds == pytest.approx(sum(told))


def test_guesses_carry_what_they_were_drawn_from():
    drafter = drafter_of(RuleProposer(lambda text, room: [7, 8][:room]))
    drafter.apply(StepBatch(1, begins=(begin(1, window=2, mode=Mode.REJECTION), begin(2, window=2))))
    drawn, certain = proposals_of(run(drafter))
    assert [distribution.token_ids for distribution in drawn.distributions] == [(7, 8), (8, 9)]
    assert certain.distributions == ()


def test_a_lost_link_forgets_everything_and_frees_the_proposer():
    proposer = RuleProposer(count_up)
    drafter = drafter_of(proposer, capacity=1)
    drafter.apply(StepBatch(5, begins=(begin(1), begin(2))))
    drafter.step()
    drafter.reset()
    assert proposer.opened == []
    assert not drafter.has_work
    with pytest.raises(ProtocolViolation):
        drafter.apply(StepBatch(1))
    drafter.attach(WELCOME)
    drafter.apply(StepBatch(1, commits=(commit(2, 3, (4,)),)))
    assert run(drafter) == [Resync(2), ProposalBatch(1, 0.0, (), idle=True)]
