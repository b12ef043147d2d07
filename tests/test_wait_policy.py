"""The rules for waiting: adapted to what was measured, and never for nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.guess_budget import expected_tokens
from verifier_service.wait_policy import Tempo, gathering, num_worth_ahead, pays_to_wait, plan_lock_step, worth_of_next

seconds = st.floats(1e-4, 1.0)


def flat(step_s: float):
    return lambda rows: np.full(len(rows), step_s)


def lone_plan(acceptance: float, turnaround_s: float, gap_s: float, step_s: float, limit: int):
    return plan_lock_step([acceptance], [limit], [Tempo(turnaround_s, gap_s)], flat(step_s), 1, limit)


def test_guesses_that_are_never_accepted_are_not_waited_for():
    assert lone_plan(0.0, 0.001, 0.001, 0.1, 8).budget.counts == (0,)
    assert not pays_to_wait(0.0, due_s=0.001, gap_s=0.001, step_s=0.1, num_worth=1, max_guesses=8)


def test_cheap_and_good_guesses_are_all_waited_for_in_lock_step():
    assert lone_plan(0.9, 0.001, 0.001, 0.1, 8).budget.counts == (8,)


def test_in_lock_step_the_number_is_the_one_that_gives_most_tokens_per_second():
    def rate(count: int) -> float:
        return expected_tokens([0.8], [count]) / (0.3 + (0.06 + (count - 1) * 0.05 if count else 0))

    assert lone_plan(0.8, 0.06, 0.05, 0.3, 16).budget.counts == (max(range(17), key=rate),)


def test_a_drafter_on_the_same_cores_is_asked_for_a_few():
    """The pair on one machine: a step of 190 ms, drafts of 50 ms, nine in ten accepted."""
    for gap_s, expected in ((0.035, range(5, 9)), (0.060, range(3, 6))):
        [count] = plan_lock_step([0.9], [16], [Tempo(gap_s + 0.01, gap_s)], lambda rows: 0.186 + 0.004 * rows, 1, 16).budget.counts
        assert count in expected


def test_a_drafter_slower_than_the_target_is_not_waited_for():
    assert lone_plan(0.9, 0.4, 0.3, 0.1, 8).budget.counts == (0,)


def test_a_batch_does_not_wait_for_its_slowest_drafter_if_that_costs_more_than_it_gives():
    tempos = [Tempo(0.004, 0.002)] * 3 + [Tempo(0.2, 0.002)]
    plan = plan_lock_step([0.8] * 4, [8] * 4, tempos, flat(0.03), 4, 32)
    assert plan.budget.counts[3] == 0
    assert min(plan.budget.counts[:3]) > 0
    assert plan.waiting_s < 0.03


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), seconds, seconds), min_size=1, max_size=4), seconds, st.floats(0, 0.1))
def test_no_deadline_gives_more_than_the_one_that_is_chosen(sequences, base_s, row_s):
    acceptances, limits = [each[0] for each in sequences], [each[1] for each in sequences]
    tempos = [Tempo(each[2], each[3]) for each in sequences]
    num_rows = len(sequences)
    plan = plan_lock_step(acceptances, limits, tempos, lambda rows: base_s + row_s * rows, num_rows, 64)
    assert all(count <= limit for count, limit in zip(plan.budget.counts, limits, strict=True))
    for deadline_s in [0.0, *(tempo.deadline_s(count) for tempo in tempos for count in range(1, 7))]:
        counts = [tempo.num_by(deadline_s, limit) for tempo, limit in zip(tempos, limits, strict=True)]
        rate = expected_tokens(acceptances, counts) / (base_s + row_s * (num_rows + sum(counts)) + deadline_s)
        assert rate <= plan.budget.rate * (1 + 1e-9)


def test_a_near_drafter_is_worth_a_wait_and_a_far_one_is_not():
    assert pays_to_wait(0.8, due_s=0.003, gap_s=0.002, step_s=0.030, num_worth=4, max_guesses=16)
    assert not pays_to_wait(0.8, due_s=0.050, gap_s=0.002, step_s=0.030, num_worth=4, max_guesses=16)


@given(st.floats(0, 1), seconds, seconds, st.integers(0, 16))
def test_no_more_is_awaited_than_can_be_scored(acceptance, gap_s, step_s, max_guesses):
    assert num_worth_ahead(acceptance, gap_s, step_s, max_guesses) <= max(1, max_guesses)


@given(st.floats(0, 1), st.floats(-1, 2), st.floats(0, 1), seconds, st.integers(1, 16))
def test_the_decision_is_defined_for_any_numbers(acceptance, due_s, gap_s, step_s, num_worth):
    assert pays_to_wait(acceptance, due_s, gap_s, step_s, num_worth, 16) in (True, False)


def test_a_first_guess_is_worth_most_where_hits_and_misses_are_balanced():
    assert worth_of_next(0.5, 0) > max(worth_of_next(0.05, 0), worth_of_next(0.95, 0))


def test_a_batch_does_not_wait_for_a_drafter_far_away():
    assert gathering(4, turnaround_s=0.020, step_s=0.030).num_sequences == 0


def test_a_batch_waits_for_half_of_its_sequences_when_the_drafter_is_near_and_for_less_than_half_a_step():
    rule = gathering(5, turnaround_s=0.002, step_s=0.030)
    assert rule.num_sequences == 3
    assert rule.longest_s < 0.015


def test_a_large_batch_never_waits():
    assert gathering(64, turnaround_s=0.0, step_s=0.030).num_sequences == 0
