from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.digest import extend
from shared.link import (
    MAX_BATCH_PROPOSALS,
    MAX_DISTRIBUTION_PAIRS,
    MAX_PROPOSAL_TOKENS,
    Capacity,
    Distribution,
    FromDrafter,
    Proposal,
    ProposalBatch,
)
from shared.merging import take_next


def _piece(sequence: int, start: int, *token_ids: int, after: tuple[int, ...] = ()) -> Proposal:
    """Guesses at `start`, of a sequence whose tail has `after` before them; all tails begin with the same digest."""
    return Proposal(sequence, start, extend(7, after), token_ids)


def _batch(step: int, *proposals: Proposal, idle: bool = False, resting: tuple[int, ...] = ()) -> ProposalBatch:
    return ProposalBatch(step, 0.25, proposals, idle, resting)


def _take_all(*frames: FromDrafter, max_tokens: int = MAX_PROPOSAL_TOKENS) -> list[FromDrafter]:
    outgoing = deque(frames)
    taken = []
    while outgoing:
        taken.append(take_next(outgoing, max_tokens))
    return taken


def test_guesses_that_wait_for_the_link_cross_in_one_message() -> None:
    batches = [
        _batch(3, _piece(1, 10, 5), _piece(2, 20, 6)),
        _batch(3, _piece(1, 11, 8, 9, after=(5,))),
        _batch(3, _piece(4, 30, 1), idle=True, resting=(2,)),
    ]
    assert _take_all(*batches) == [
        ProposalBatch(3, 0.75, (_piece(1, 10, 5, 8, 9), _piece(2, 20, 6), _piece(4, 30, 1)), idle=True, resting=(2,)),
    ]


def test_guesses_made_after_different_steps_stay_apart() -> None:
    batches = [_batch(3, _piece(1, 10, 5)), _batch(4, _piece(1, 11, 6, after=(5,)))]
    assert _take_all(*batches) == batches


def test_nothing_overtakes_anything() -> None:
    frames: list[FromDrafter] = [_batch(3, _piece(1, 10, 5)), Capacity(4), _batch(3, _piece(1, 11, 6, after=(5,)))]
    assert _take_all(*frames) == frames


def test_a_piece_that_does_not_follow_the_one_before_stays_a_piece() -> None:
    batches = [_batch(3, _piece(1, 10, 5)), _batch(3, _piece(1, 13, 6, after=(5,)))]
    assert _take_all(*batches) == batches


def test_a_piece_that_was_made_for_another_text_stays_a_piece() -> None:
    batches = [_batch(3, _piece(1, 10, 5)), _batch(3, _piece(1, 11, 6, after=(4,)))]
    assert _take_all(*batches) == batches


def test_what_guesses_were_drawn_from_stays_with_them() -> None:
    drawn = [Proposal(1, 10 + index, extend(0, range(index)), (index,), (Distribution((index,), (1.0,)),)) for index in range(2)]
    batches = [_batch(3, piece) for piece in drawn]
    assert _take_all(*batches) == [ProposalBatch(3, 0.5, (Proposal(1, 10, 0, (0, 1), drawn[0].distributions + drawn[1].distributions),), idle=False)]


@pytest.mark.parametrize("num_pieces", [MAX_PROPOSAL_TOKENS, MAX_PROPOSAL_TOKENS + 1, 3 * MAX_PROPOSAL_TOKENS])
def test_no_proposal_grows_beyond_what_the_verifier_takes(num_pieces: int) -> None:
    taken = _take_all(*(_batch(3, _piece(1, 10 + index, index, after=tuple(range(index)))) for index in range(num_pieces)))
    assert [len(frame.proposals[0].token_ids) for frame in taken if isinstance(frame, ProposalBatch)] == [MAX_PROPOSAL_TOKENS] * (
        num_pieces // MAX_PROPOSAL_TOKENS
    ) + ([1] if num_pieces % MAX_PROPOSAL_TOKENS else [])


def test_no_proposal_grows_beyond_what_this_verifier_has_said_it_takes() -> None:
    taken = _take_all(*(_batch(3, _piece(1, 10 + index, index, after=tuple(range(index)))) for index in range(7)), max_tokens=3)
    assert [len(frame.proposals[0].token_ids) for frame in taken if isinstance(frame, ProposalBatch)] == [3, 3, 1]


def test_no_batch_grows_beyond_the_proposals_that_a_message_takes() -> None:
    full = _batch(3, *(_piece(sequence, 10, 5) for sequence in range(MAX_BATCH_PROPOSALS)))
    more = _batch(3, _piece(MAX_BATCH_PROPOSALS, 10, 5))
    assert _take_all(full, more) == [full, more]


def test_a_message_stays_small_whatever_guesses_were_drawn_from() -> None:
    drawn_from = Distribution(tuple(range(MAX_DISTRIBUTION_PAIRS)), (1 / MAX_DISTRIBUTION_PAIRS,) * MAX_DISTRIBUTION_PAIRS)
    batches = [
        _batch(3, *(Proposal(sequence, 10 + index, extend(0, range(index)), (index,), (drawn_from,)) for sequence in range(512)))
        for index in range(5)
    ]  # 33,280 ids each
    assert _take_all(*batches) == batches


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True), min_size=1, max_size=8), st.integers(1, 3))
def test_every_guess_arrives_once_and_in_its_place(turns: list[list[int]], num_steps: int) -> None:
    lengths = dict.fromkeys(range(1, 5), 10)
    batches = []
    for index, sequences in enumerate(turns):
        proposals = []
        for sequence in sequences:
            length = lengths[sequence]
            proposals.append(_piece(sequence, length, length, length + 1, after=tuple(range(10, length))))
            lengths[sequence] += 2
        batches.append(_batch(index * num_steps // len(turns), *proposals))
    arrived: dict[int, list[int]] = {}
    for frame in _take_all(*batches):
        assert isinstance(frame, ProposalBatch)
        for proposal in frame.proposals:
            assert proposal.start == 10 + len(arrived.get(proposal.sequence, []))
            arrived.setdefault(proposal.sequence, []).extend(proposal.token_ids)
    assert arrived == {sequence: list(range(10, length)) for sequence, length in lengths.items() if length > 10}
