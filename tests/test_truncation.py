"""Truncation in numpy, by candidates, and in torch, by sorted values: one and the same set of tokens. Then the rules, case by case."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.picking import process
from shared.sampling import SamplingParams
from shared.truncation import truncate, truncate_on_device
from tests.support.picks import make_pick

INF = math.inf


def kept_by(way, scores, top_k, top_p, min_p):
    truncated = scores.clone()
    way(truncated, top_k, top_p, min_p)
    kept = truncated > -INF
    assert truncated[kept].equal(scores[kept])
    return kept


def kept_in_plain_steps(row, top_k, top_p, min_p):
    order = row.sort(descending=True, stable=True)
    values, ids = order.values[: top_k or None].double(), order.indices[: top_k or None]
    mass = (values - values[0]).exp().cumsum(0)
    size = 1 + int((mass < top_p * mass[-1]).sum()) if top_p < 1 else len(ids)
    large = ids[:size][values[:size] >= values[0] + (math.log(min_p) if min_p else -INF)]
    return torch.zeros(len(row), dtype=torch.bool).index_fill_(0, large, True) & (row > -INF)


# Shares that no sum of weights meets exactly.
RULES = st.tuples(
    st.sampled_from([0, 1, 3, 50, 700]), st.sampled_from([1.0, 0.012345, 0.512345, 0.9512345, 0.999991]), st.sampled_from([0.0, 0.0512345])
)


@given(
    rules=st.lists(RULES, min_size=1, max_size=4),
    width=st.sampled_from([1, 7, 64, 1000, 5000, 40_000]),
    scale=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    decimals=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 2**63 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=150, deadline=None)
def test_both_ways_keep_what_plain_steps_keep(rules, width, scale, decimals, seed, dtype):
    noise = torch.randn(len(rules), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scores = (noise * scale).round(decimals=decimals).to(dtype)
    scores[:, 3::5] = -INF
    columns = [list(column) for column in zip(*rules, strict=True)]
    expected = torch.stack([kept_in_plain_steps(row, *rule) for row, rule in zip(scores, rules, strict=True)])
    assert kept_by(truncate, scores, *columns).equal(expected)
    assert kept_by(truncate_on_device, scores, *columns).equal(expected)


def test_rows_of_a_wider_tensor_are_changed_where_they_stand():
    whole = torch.arange(24.0).view(2, 12)
    truncate(whole[:, 2:10], [2, 1], [1.0, 1.0], [0.0, 0.0])
    assert (whole > -INF).nonzero().tolist() == [[0, 0], [0, 1], *[[0, i] for i in range(8, 12)], [1, 0], [1, 1], *[[1, i] for i in range(9, 12)]]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_without_a_distribution_hurts_no_other(bad):
    scores = torch.tensor([[1.0, bad, 3.0], [1.0, 2.0, 3.0], [-INF, -INF, -INF]])
    truncate(scores, [1] * 3, [0.5] * 3, [0.1] * 3)
    assert scores[1].tolist() == [-INF, -INF, 3.0]


@pytest.mark.parametrize("share", [0.2, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_the_nucleus_is_the_same_however_far_it_reaches(share, scale):
    # Rounded logits: thousands of ties, many of them at the edge.
    logits = (torch.randn(1, 30_000, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * scale).round(decimals=2)
    kept = process(logits, [make_pick(SamplingParams(top_p=share))])[0] > -INF
    ordered = logits[0].sort(descending=True, stable=True)
    mass = (ordered.values - ordered.values[0]).exp().cumsum(0)
    size = 1 + int((mass < share * mass[-1]).sum())
    assert kept.nonzero()[:, 0].equal(ordered.indices[:size].sort().values)


def test_ties_at_the_kth_stay_in_order_of_id():
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    assert (process(logits, [make_pick(SamplingParams(top_k=3))])[0] > -INF).nonzero()[:, 0].tolist() == [1, 2, 3]
    # Also where ties are so many that a heap would lose their order.
    flat = torch.zeros(1, 50_000)
    assert (process(flat, [make_pick(SamplingParams(top_k=40))])[0] > -INF).nonzero()[:, 0].tolist() == list(range(40))


def test_top_p_keeps_the_smallest_prefix_with_enough_mass_and_at_least_one():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()

    def kept(top_p):
        return (process(logits, [make_pick(SamplingParams(top_p=top_p))])[0] > -INF).nonzero()[:, 0].tolist()

    assert kept(1e-9) == [0]
    assert kept(0.4999) == [0]
    assert kept(0.5001) == [0, 1]
    assert kept(0.7501) == [0, 1, 2]
    assert kept(0.8751) == [0, 1, 2, 3]
    # Exactly enough is enough: of four equals, two have half of the mass.
    assert (process(torch.zeros(1, 4), [make_pick(SamplingParams(top_p=0.5))])[0] > -INF).nonzero()[:, 0].tolist() == [0, 1]


def test_top_p_is_measured_on_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    # Of the best two, the first has 4/7 of the mass.
    kept = process(logits, [make_pick(SamplingParams(top_k=2, top_p=0.55))])[0] > -INF
    assert kept.tolist() == [True, False, False, False]
