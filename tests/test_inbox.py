"""What waits for the engine: bounded, in order, and put together where that says the same."""

from shared.digest import extend
from shared.link import Capacity, Distribution, Proposal, ProposalBatch
from verifier_service.inbox import Inbox


def _piece(num_tokens: int) -> ProposalBatch:
    return ProposalBatch(0, 0.0, (Proposal(99, 3, 5, (1,) * num_tokens),), False)


def test_it_is_bounded_by_frames_and_by_ids_but_takes_any_single_frame() -> None:
    inbox = Inbox(max_frames=3, max_ids=100)
    assert [inbox.put(Capacity(1), at) for at in (1.0, 2.0, 3.0, 4.0)] == [True, False, False, None]
    assert [arrived for _, arrived in inbox.take()] == [1.0, 2.0, 3.0]
    assert inbox.take() == []
    drawn = ProposalBatch(0, 0.0, (Proposal(1, 3, 5, (1,), (Distribution(tuple(range(60)), (1 / 60,) * 60),)),), False)
    assert [inbox.put(drawn, 5.0), inbox.put(drawn, 6.0), inbox.put(_piece(39), 7.0)] == [True, None, False]
    inbox.take()
    assert inbox.put(_piece(101), 8.0) is True
    assert inbox.put(Capacity(1), 9.0) is None
    inbox.take()
    resting = ProposalBatch(0, 0.0, (), False, tuple(range(60)))
    assert [inbox.put(resting, 10.0), inbox.put(resting, 11.0)] == [True, None]


def test_guesses_that_pile_up_are_looked_at_once_but_the_first_answer_to_a_step_stays_alone() -> None:
    inbox = Inbox(max_frames=20, max_ids=100)
    for step, at in ((4, 1.0), (4, 2.0), (4, 3.0), (4, 4.0), (5, 5.0), (5, 6.0), (5, 7.0)):
        start = int(at)
        guess = Proposal(1, start, extend(0, range(1, start)), (start,))
        assert inbox.put(ProposalBatch(step, 0.25, (guess,), idle=False), at) is (at == 1.0)
    taken = [
        (frame.step, frame.proposals[0].token_ids, frame.draft_seconds, arrived)
        for frame, arrived in inbox.take()
        if isinstance(frame, ProposalBatch)
    ]
    assert taken == [(4, (1,), 0.25, 1.0), (4, (2, 3, 4), 0.75, 4.0), (5, (5,), 0.25, 5.0), (5, (6, 7), 0.5, 7.0)]
