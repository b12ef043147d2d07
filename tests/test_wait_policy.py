"""The rule for waiting: bounded, adapted to what was measured, and never for nothing."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.wait_policy import num_sequences_to_serve, num_worth_waiting_for, wait_limit_s

seconds = st.floats(1e-4, 1.0)


def test_guesses_that_are_never_accepted_are_not_waited_for_on_one_machine():
    assert num_worth_waiting_for(0.0, gap_s=0.01, step_s=0.1, max_guesses=8, runs_ahead=False) == 0


def test_cheap_and_good_guesses_are_all_waited_for_on_one_machine():
    assert num_worth_waiting_for(0.9, gap_s=0.001, step_s=0.1, max_guesses=8, runs_ahead=False) == 8


def test_on_one_machine_one_more_guess_is_awaited_while_it_pays():
    # Brute force: the count that gives most tokens per second.
    def rate(count: int) -> float:
        return sum(0.8**i for i in range(count + 1)) / (0.3 + count * 0.05)

    best = max(range(9), key=rate)
    assert num_worth_waiting_for(0.8, gap_s=0.05, step_s=0.3, max_guesses=8, runs_ahead=False) == best


@given(st.floats(0, 1), seconds, seconds, st.integers(0, 16), st.booleans())
def test_no_more_is_awaited_than_can_be_scored(acceptance, gap_s, step_s, max_guesses, runs_ahead):
    assert 0 <= num_worth_waiting_for(acceptance, gap_s, step_s, max_guesses, runs_ahead) <= max_guesses


@given(st.floats(0, 100), seconds, st.integers(0, 16), seconds)
def test_a_wait_is_never_longer_than_a_plain_step(turnaround_s, gap_s, num_worth, step_s):
    assert 0 <= wait_limit_s(turnaround_s, gap_s, num_worth, step_s) <= step_s


def test_a_batch_does_not_wait_for_a_drafter_far_away():
    assert num_sequences_to_serve(4, turnaround_s=0.020, step_s=0.030, runs_ahead=True) == 0


def test_a_batch_waits_for_half_of_its_sequences_when_the_drafter_is_near():
    assert num_sequences_to_serve(5, turnaround_s=0.002, step_s=0.030, runs_ahead=True) == 3


def test_a_large_batch_never_waits():
    assert num_sequences_to_serve(64, turnaround_s=0.0, step_s=0.030, runs_ahead=True) == 0
