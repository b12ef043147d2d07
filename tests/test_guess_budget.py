"""Which guesses a step scores: those that pay, whatever the curve of its cost."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.acceptance import Acceptance
from verifier_service.exploration import Exploration
from verifier_service.guess_budget import allot, expected_tokens, num_worth

sequences = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), min_size=1, max_size=4)
knots = st.lists(st.floats(0, 0.05), min_size=20, max_size=20)


def linear(base_s: float, row_s: float):
    return lambda rows: base_s + row_s * rows


@given(sequences, knots)
def test_no_other_choice_gives_more_tokens_per_second(made, increments):
    curve = 0.03 + np.cumsum(increments)
    acceptances, limits = [rate for rate, _ in made], [limit for _, limit in made]
    best = allot(acceptances, limits, curve.__getitem__, len(made), 16)
    chosen = max(
        expected_tokens(acceptances, counts) / curve[len(made) + sum(counts)] for counts in itertools.product(*(range(limit + 1) for limit in limits))
    )
    assert best.rate == pytest.approx(chosen)
    assert best.num_tokens == pytest.approx(expected_tokens(acceptances, best.counts))


@given(sequences, st.integers(0, 10))
def test_no_more_is_given_than_there_is(made, budget):
    limits = [limit for _, limit in made]
    best = allot([rate for rate, _ in made], limits, linear(0.03, 0.0), len(made), budget)
    assert sum(best.counts) <= budget
    assert all(count <= limit for count, limit in zip(best.counts, limits, strict=True))


def test_where_rows_cost_nothing_all_guesses_are_scored():
    assert allot([0.9, 0.05], [8, 8], linear(0.03, 0.0), 2, 99).counts == (8, 8)


def test_where_rows_cost_much_the_better_sequence_gets_more_and_the_worse_none():
    counts = allot([0.9, 0.3], [8, 8], linear(0.02, 0.01), 2, 99).counts
    assert counts[0] > 0
    assert counts[1] == 0


def test_a_larger_batch_scores_fewer_guesses_of_each():
    few, many = (allot([0.8] * size, [16] * size, linear(0.03, 0.0001), size, 2000).counts[0] for size in (1, 64))
    assert many < few == 16


def test_the_cut_of_a_linear_cost_is_where_worth_meets_cost():
    best = allot([0.8] * 64, [16] * 64, linear(0.03, 0.0001), 64, 2000)
    assert set(best.counts) <= {num_worth(0.8, 0.0001 * best.rate, 16), num_worth(0.8, 0.0001 * best.rate, 16) + 1}


def test_an_empty_batch_gets_nothing():
    assert allot([], [], linear(0.03, 0.0), 0, 9).counts == ()


# -- acceptance


def test_guesses_behind_the_first_rejected_one_are_no_tries():
    acceptance = Acceptance.starting_at(0.5)
    tried = acceptance.tried
    acceptance.observe(2, 8)
    assert acceptance.tried == pytest.approx(tried, abs=3.2)
    assert acceptance.tried > tried + 2.5


def test_the_lower_bound_comes_up_to_the_estimate_with_evidence():
    few, many = Acceptance.starting_at(0.8), Acceptance.starting_at(0.8)
    for _ in range(30):
        many.observe(4, 5)
    assert few.bound(-1) < many.bound(-1) < many.rate
    assert 0.0 <= Acceptance.starting_at(0.0).bound(-3) <= Acceptance.starting_at(1.0).bound(3) <= 1.0


# -- exploration


def test_probes_cost_a_small_share_of_the_time_and_do_not_die():
    exploration = Exploration()
    while exploration.spend(0.01):
        pass  # what is granted at the start
    num_probes = 0
    for _ in range(100_000):
        exploration.earn(0.03)
        num_probes += exploration.spend(0.01)
    assert 0 < num_probes * 0.01 <= 0.01 * 100_000 * 0.03
    assert num_probes > 100
