"""Draws by inverse transform and the form of distributions on the wire."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shared.drawing import invert, pad, to_wire
from shared.link import Distribution
from shared.noise import derive_key, key_tensor, uniforms
from tests.support.draws import draw

ALPHA = 1e-4  # false alarm rate; seeds are fixed


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-17, 0.1, 1.0, 3.0]), min_size=1, max_size=9).filter(lambda row: sum(row) > 0),
    draws=st.floats(2.0**-33, 1 - 2.0**-33),
)
def test_what_is_drawn_has_weight(weights, draws):
    place = invert(torch.tensor([weights], dtype=torch.float64), torch.tensor([draws], dtype=torch.float64))
    assert weights[place] > 0


def test_draws_fall_into_the_shares_of_the_unit_interval():
    weights = torch.tensor([2.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    draws = torch.tensor([0.01, 0.24, 0.26, 0.374, 0.376, 0.99], dtype=torch.float64)
    assert invert(weights.expand(6, 4), draws).tolist() == [0, 0, 2, 2, 3, 3]


def test_the_wire_form_holds_the_best_tokens_renormalised_in_float32():
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64).log()
    wide, certain = to_wire(scores, max_pairs=3)
    assert wide.token_ids == (1, 3, 2)
    assert wide.probabilities == pytest.approx((4 / 9, 3 / 9, 2 / 9), rel=1e-6)
    assert wide.probabilities == tuple(torch.tensor(wide.probabilities, dtype=torch.float32).tolist())
    assert certain == Distribution((0,), (1.0,)), "excluded tokens stay at home"


def test_the_wire_form_of_a_wide_vocabulary_obeys_the_link():
    [wire] = to_wire(torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1)))
    assert len(wire.token_ids) == len(set(wire.token_ids)) == 64
    assert sum(wire.probabilities) == pytest.approx(1.0, abs=1e-5)
    assert min(wire.probabilities) > 0


def test_guesses_have_the_distribution_of_their_wire_form():
    wire = to_wire(torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -2.0]]), max_pairs=4)[0]
    num_draws = 100_000
    ids, weights = pad([wire])
    keys = key_tensor([derive_key(3, "draft")])
    places = invert(weights.expand(num_draws, -1), uniforms(keys, torch.arange(num_draws)))
    counts = torch.bincount(places, minlength=len(wire.token_ids)).numpy()
    expected = weights[0].numpy() / weights[0].numpy().sum() * num_draws
    assert stats.chisquare(counts, expected).pvalue > ALPHA
    assert stats.chisquare(counts, expected[::-1]).pvalue < ALPHA, "negative control"
    # One by one it is the same draw.
    alone = [draw(wire, derive_key(3, "draft"), position) for position in range(300)]
    assert alone == ids[0][places[:300]].tolist()


def test_padding_has_no_weight():
    ids, weights = pad([Distribution((7, 9), (0.5, 0.5)), Distribution((), ()), Distribution((3,), (1.0,))])
    assert ids.tolist() == [[7, 9], [0, 0], [3, 0]]
    assert weights.tolist() == [[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]]
    assert [tensor.shape for tensor in pad([])] == [(0, 1), (0, 1)]
