"""From runs to figures: percentiles, paired ratios, comparisons, counters."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from client.bench.measure import Drafts, Run, add_up, between
from client.bench.ratio import Ratio, interleave, paired_ratio
from client.bench.summary import compare, first_difference, percentile, summarise

RUN = Run(
    duration_s=2.0,
    requests_per_s=1.0,
    output_per_s=20.0,
    total_per_s=30.0,
    steady_per_s=25.0,
    ttft_s=(0.1, 0.2),
    tpot_s=(0.05, 0.05),
    gap_s=(0.05, 0.06),
    e2e_s=(1.0, 1.0),
    send_lag_s=0.0,
    drafts=Drafts(2, 8, 5, (2, 2, 2, 2), (2, 1, 1, 1)),
    errors={},
    texts=((1, 2, 3), (4, 5)),
    prompt_ids=((7,), (8,)),
)


def faster(factor: float, texts=RUN.texts) -> Run:
    return replace(RUN, output_per_s=20.0 * factor, steady_per_s=25.0 * factor, tpot_s=(0.05 / factor,) * 2, texts=texts)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(count):
    random = Random(count)
    values = [random.expovariate(1.0) for _ in range(count)]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_ratio_is_the_median_over_pairs_not_the_ratio_of_medians():
    """A machine that slows down by half in the middle: the pairs do not notice."""
    slow = [10.0, 10.0, 10.0, 5.0, 5.0, 5.0, 5.0]
    assert paired_ratio([2 * value for value in slow], slow) == Ratio(2.0, 2.0, 2.0, 7)
    ratio = paired_ratio([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert ratio.median == 2.0
    assert 1.0 <= ratio.low < 2.0 < ratio.high <= 3.0


def test_the_interval_holds_the_true_ratio_as_often_as_is_said():
    """300 experiments of 21 pairs, true median 1: 94% of the intervals hold it; fewer than 262 are five standard errors away (p < 1e-6)."""
    random = Random(5)
    hits = outside = 0
    for _ in range(300):
        ratios = [math.exp(random.gauss(0.0, 0.1)) for _ in range(21)]
        ratio = paired_ratio(ratios, [1.0] * 21)
        hits += ratio.low <= 1.0 <= ratio.high
        outside += ratio.low <= 1.1 <= ratio.high
    assert hits >= 262
    assert outside < 100  # negative control: a ratio that is not the true one


def test_the_same_figures_give_the_same_interval():
    figures = [1.0, 1.3, 0.9, 1.1, 1.2, 1.0, 1.4]
    assert paired_ratio(figures, [1.0] * 7) == paired_ratio(figures, [1.0] * 7)


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [float("nan")])])
def test_what_is_no_pair_of_figures_is_refused(left, right):
    with pytest.raises(ValueError, match=r"pair|positive"):
        paired_ratio(left, right)


def test_two_things_take_turns_and_neither_is_always_first():
    calls = []
    a, b = interleave(lambda: calls.append("A") or 1.0, lambda: calls.append("B") or 2.0, 4)
    assert "".join(calls) == "ABBAABBA"
    assert (a, b) == ([1.0] * 4, [2.0] * 4)


def test_arms_are_compared_pair_by_pair_and_above_one_is_better_everywhere():
    found = compare("draft", [faster(2.0), faster(3.0)], "plain", [RUN, faster(1.5)])
    for merit in ("steady_per_s", "output_per_s", "inverse_tpot"):
        assert found.ratios[merit].median == pytest.approx(2.0)
    speedup = found.speedup()
    assert speedup is not None
    assert speedup.num_pairs == 2


def test_without_a_time_when_all_places_were_busy_the_time_per_token_says_it():
    runs = [replace(faster(2.0), steady_per_s=None, output_per_s=20.0)] * 2
    speedup = compare("draft", runs, "plain", [replace(RUN, steady_per_s=None)] * 2).speedup()
    assert speedup is not None
    assert speedup.median == pytest.approx(2.0)


def test_a_run_in_which_everything_failed_gives_no_ratio():
    failed = replace(RUN, output_per_s=0.0, steady_per_s=None, ttft_s=(), tpot_s=(), gap_s=(), e2e_s=(), texts=((), ()), errors={"OVERLOADED": 2})
    found = compare("draft", [failed, RUN], "plain", [RUN, RUN])
    assert found.ratios == {}
    assert found.speedup() is None
    assert found.num_texts == 2
    summary = summarise([failed, RUN])
    assert summary.errors == {"OVERLOADED": 2}
    assert summarise([failed]).ttft is None


def test_texts_are_compared_and_the_first_difference_is_told():
    found = compare("draft", [faster(1.0, ((1, 2, 9), (4, 5))), RUN], "plain", [RUN, RUN])
    assert (found.num_texts, found.num_same, found.first_differences, found.num_compared_tokens) == (4, 3, (2,), 3 + 2 + 3 + 2)
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_counters_are_what_they_grew_by_and_add_up_over_runs():
    before, after = Drafts(10, 40, 20, (10, 10), (9, 5)), Drafts(12, 48, 25, (12, 12), (11, 6))
    grown = between(before, after)
    assert grown == Drafts(2, 8, 5, (2, 2), (2, 1))
    assert add_up([grown, grown]) == Drafts(4, 16, 10, (4, 4), (4, 2))
    assert grown.acceptance_rate == 5 / 8
    assert grown.mean_accepted_length == 1 + 5 / 2
    assert Drafts().acceptance_rate is Drafts().mean_accepted_length is None
