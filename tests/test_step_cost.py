"""What a step is thought to cost: monotone, close to what was measured, refined by what is observed, calm about outliers."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.step_cost import StepCost

POINTS = {1: 0.030, 2: 0.031, 4: 0.033, 8: 0.037, 16: 0.045, 32: 0.061}


def test_between_what_was_measured_the_cost_is_a_line_and_beyond_it_the_last_slope_goes_on():
    cost = StepCost(POINTS)
    assert cost.seconds(8) == pytest.approx(0.037)
    assert cost.seconds(12) == pytest.approx(0.041)
    assert cost.seconds(64) == pytest.approx(0.093)
    assert cost.seconds(1) == pytest.approx(0.030)


@given(st.dictionaries(st.integers(1, 200), st.floats(1e-3, 1), max_size=6), st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 1)), min_size=1))
def test_a_larger_step_is_never_thought_to_be_cheaper(points, observed):
    cost = StepCost(points)
    for rows, seconds in observed:
        cost.observe(rows, seconds)
    taken = [cost.seconds(rows) for rows in range(1, 400, 7)]
    assert taken == sorted(taken)
    assert min(taken) > 0
    assert list(cost.points.values()) == sorted(cost.points.values())


@given(st.dictionaries(st.integers(1, 300), st.floats(1e-3, 1.0), min_size=1, max_size=6), st.integers(1, 500))
def test_one_number_and_many_are_looked_up_alike(points, num_rows):
    cost = StepCost(points)
    cost.observe(7, 0.02)
    assert cost.seconds(num_rows) == pytest.approx(cost.seconds_of(np.array([num_rows]))[0])


def test_a_machine_that_has_become_slower_is_followed_in_all_sizes():
    cost = StepCost(POINTS)
    for _ in range(60):
        cost.observe(4, 0.066)
    assert cost.seconds(4) == pytest.approx(0.066, rel=0.02)
    assert cost.seconds(32) == pytest.approx(0.122, rel=0.25)


def test_a_size_that_costs_more_than_was_measured_is_learnt():
    cost, order = StepCost(POINTS), random.Random(0)
    for _ in range(3000):
        rows = order.choice((1, 4, 16))
        cost.observe(rows, {1: 0.030, 4: 0.033, 16: 0.090}[rows] * order.uniform(0.9, 1.1))
    assert cost.seconds(16) == pytest.approx(0.090, rel=0.15)
    assert cost.seconds(1) == pytest.approx(0.030, rel=0.15)


def test_one_stray_step_changes_little():
    cost = StepCost(POINTS)
    cost.observe(4, 30.0)
    assert cost.seconds(4) < 0.033 * 1.05


def test_without_a_measurement_the_first_step_stands_for_all():
    cost = StepCost()
    assert not cost.is_known
    assert cost.points == {}
    cost.observe(3, 0.2)
    assert cost.is_known
    assert cost.seconds(1) == cost.seconds(100) == pytest.approx(0.2)
