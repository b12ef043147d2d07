"""Stops inside an accepted run are where one-token-at-a-time decoding would have stopped."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.request import FinishReason, Stopping
from verifier_service.stopping import Stop, find_stop


def test_the_end_of_sequence_inside_a_run_ends_it_there():
    assert find_stop([5, 0, 7], 3, Stopping(max_tokens=10, eos_ids=frozenset({0}))) == Stop(2, FinishReason.EOS, 0)


def test_a_stop_token_is_told_apart_from_the_end_of_sequence():
    assert find_stop([5, 9], 0, Stopping(10, eos_ids=frozenset({0}), stop_ids=frozenset({9}))) == Stop(2, FinishReason.STOP_TOKEN, 9)


def test_the_token_limit_falls_inside_a_run():
    assert find_stop([1, 2, 3, 4], 2, Stopping(max_tokens=4)) == Stop(2, FinishReason.LENGTH)


def test_a_stop_token_at_the_limit_is_the_reason():
    assert find_stop([1, 9], 0, Stopping(2, stop_ids=frozenset({9}))) == Stop(2, FinishReason.STOP_TOKEN, 9)


tokens = st.integers(0, 6)


@given(st.lists(tokens, min_size=1, max_size=8), st.integers(0, 5), st.integers(1, 12), st.sets(tokens), st.sets(tokens))
def test_a_run_stops_where_its_tokens_one_by_one_would(run, generated, max_tokens, eos, stop):
    stopping = Stopping(max(max_tokens, generated + 1), 0, frozenset(eos), frozenset(stop))
    expected = None
    for index, token in enumerate(run):
        one = find_stop([token], generated + index, stopping)
        if one is not None:
            expected = Stop(index + 1, one.reason, one.matched_id)
            break
    assert find_stop(run, generated, stopping) == expected
