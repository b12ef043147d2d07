import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.ngram import NgramIndex, NgramProposer, look_up
from draft_service.tail import DraftSequence
from shared.link import Begin, Commit
from shared.sampling import Mode, SamplingParams

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def sequence_of(token_ids: list[int], window: int = 8, mode: Mode = Mode.COUPLED) -> DraftSequence:
    begin = Begin(1, len(token_ids), tuple(token_ids), mode, SamplingParams(temperature=1.0), 7, window)
    return DraftSequence.of(begin, vocab_size=100, max_length=1_000)


def test_what_followed_the_last_occurrence_is_proposed_up_to_the_room():
    assert look_up([1, 2, 3, 4, 5, 1, 2], [], 2, 4, room=3) == [3, 4, 5]
    assert look_up([1, 2, 3, 4, 5, 1, 2], [], 2, 4, room=99) == [3, 4, 5, 1, 2]


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert look_up([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], [], 2, 4, room=1) == [7]


def test_the_most_recent_of_equally_long_matches_wins():
    assert look_up([2, 3, 7, 2, 3, 8, 2, 3], [], 2, 4, room=1) == [8]


def test_a_match_may_reach_into_the_tail_but_ends_in_committed_text():
    assert look_up([1, 2, 3, 4, 1], [2], 2, 4, room=2) == [3, 4]
    assert look_up([1, 2], [5, 6, 5, 6], 2, 4, room=2) == []


def test_a_single_shared_token_is_no_match_with_the_default_lengths():
    assert NgramProposer().modes == (Mode.COUPLED, Mode.REJECTION)
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 3, 2])
    proposer.open(sequence)
    assert proposer.propose([(sequence, 4)]) == [[]]


@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=5), tail=TOKENS, min_n=st.integers(1, 3), more=st.integers(0, 3), room=st.integers(1, 6))
def test_the_growing_index_answers_like_the_plain_search(prompt, pieces, tail, min_n, more, room):
    committed, index = list(prompt), NgramIndex(min_n, min_n + more)
    for piece in [[], *pieces]:
        committed += piece
        index.grow(committed)
        assert index.look_up(committed, tail, room) == look_up(committed, tail, min_n, min_n + more, room)


def test_guesses_are_certain_in_rejection_mode():
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 3, 1, 2], mode=Mode.REJECTION)
    proposer.open(sequence)
    (guesses,) = proposer.propose([(sequence, 2)])
    assert [(guess.token_id, guess.distribution) for guess in guesses] == [(3, None), (1, None)]


def test_a_periodic_text_is_continued_call_after_call():
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 3, 1, 2, 3], window=32)
    proposer.open(sequence)
    while len(sequence.tail) < 10:
        (guesses,) = proposer.propose([(sequence, 10 - len(sequence.tail))])
        sequence.extend(guess.token_id for guess in guesses)
    assert sequence.tail == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_committed_tokens_are_found_by_later_lookups():
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 3])
    proposer.open(sequence)
    assert proposer.propose([(sequence, 4)]) == [[]]
    sequence.settle(Commit(1, base_length=3, accepted=0, token_ids=(9, 1, 2), window=8))
    (guesses,) = proposer.propose([(sequence, 2)])
    assert [guess.token_id for guess in guesses] == [3, 9]


def test_a_closed_sequence_leaves_nothing_for_its_number():
    proposer, sequence = NgramProposer(), sequence_of([1, 2, 3, 1, 2])
    proposer.open(sequence)
    proposer.propose([(sequence, 1)])
    proposer.close(sequence)
    other = sequence_of([5, 6, 7, 1, 2])
    proposer.open(other)
    assert proposer.propose([(other, 1)]) == [[]]


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 4), (3, 2)])
def test_impossible_lengths_are_refused(min_n, max_n):
    with pytest.raises(ValueError, match="min_n <= max_n"):
        NgramProposer(min_n, max_n)
