"""The rule for waiting: adapted to what was measured, and never for nothing."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.wait_policy import num_sequences_to_serve, num_worth_ahead, num_worth_in_lock_step, pays_to_wait

seconds = st.floats(1e-4, 1.0)


def test_guesses_that_are_never_accepted_are_not_waited_for():
    assert num_worth_in_lock_step(0.0, turnaround_s=0.001, gap_s=0.001, step_s=0.1, max_guesses=8) == 0
    assert not pays_to_wait(0.0, due_s=0.001, gap_s=0.001, step_s=0.1, num_worth=1, max_guesses=8)


def test_cheap_and_good_guesses_are_all_waited_for_in_lock_step():
    assert num_worth_in_lock_step(0.9, turnaround_s=0.001, gap_s=0.001, step_s=0.1, max_guesses=8) == 8


def test_in_lock_step_the_number_is_the_one_that_gives_most_tokens_per_second():
    def rate(count: int) -> float:
        tokens = sum(0.8**i for i in range(count + 1))
        return tokens / (0.3 + (0.06 + (count - 1) * 0.05 if count else 0))

    assert num_worth_in_lock_step(0.8, turnaround_s=0.06, gap_s=0.05, step_s=0.3, max_guesses=5) == max(range(6), key=rate)


def test_in_lock_step_no_more_is_drafted_than_fits_into_a_step():
    assert num_worth_in_lock_step(0.99, turnaround_s=0.06, gap_s=0.05, step_s=0.2, max_guesses=8) == 3


def test_a_drafter_slower_than_the_target_is_not_waited_for():
    assert num_worth_in_lock_step(0.9, turnaround_s=0.4, gap_s=0.3, step_s=0.1, max_guesses=8) == 0


def test_a_near_drafter_is_worth_a_wait_and_a_far_one_is_not():
    assert pays_to_wait(0.8, due_s=0.003, gap_s=0.002, step_s=0.030, num_worth=4, max_guesses=16)
    assert not pays_to_wait(0.8, due_s=0.050, gap_s=0.002, step_s=0.030, num_worth=4, max_guesses=16)


@given(st.floats(0, 1), seconds, seconds, seconds, st.integers(0, 16))
def test_no_more_is_awaited_than_can_be_scored(acceptance, turnaround_s, gap_s, step_s, max_guesses):
    assert 0 <= num_worth_in_lock_step(acceptance, turnaround_s, gap_s, step_s, max_guesses) <= max_guesses
    assert num_worth_ahead(acceptance, gap_s, step_s, max_guesses) <= max(1, max_guesses)


@given(st.floats(0, 1), st.floats(-1, 2), st.floats(0, 1), seconds, st.integers(1, 16))
def test_the_decision_is_defined_for_any_numbers(acceptance, due_s, gap_s, step_s, num_worth):
    assert pays_to_wait(acceptance, due_s, gap_s, step_s, num_worth, 16) in (True, False)


def test_a_batch_does_not_wait_for_a_drafter_far_away():
    assert num_sequences_to_serve(4, turnaround_s=0.020, step_s=0.030, runs_ahead=True) == 0


def test_a_batch_waits_for_half_of_its_sequences_when_the_drafter_is_near():
    assert num_sequences_to_serve(5, turnaround_s=0.002, step_s=0.030, runs_ahead=True) == 3


def test_a_large_batch_never_waits():
    assert num_sequences_to_serve(64, turnaround_s=0.0, step_s=0.030, runs_ahead=True) == 0


def test_on_one_machine_a_batch_waits_for_all():
    assert num_sequences_to_serve(64, turnaround_s=0.1, step_s=0.030, runs_ahead=False) == 64
