"""Acceptance along recorded text does not fall: real weights, float32, one text at a time and eight together."""

from dataclasses import astuple

import pytest

from bench.acceptance.__main__ import TEMPERATURES, along, load_recorded, rows_of, texts_of
from bench.acceptance.measure import measure
from bench.acceptance.proposers import NUM_GUESSES, PROPOSERS, proposer, target

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(1200)]
TOLERANCE = 0.01


@pytest.mark.parametrize("name", PROPOSERS)
def test_the_record_is_long_enough(name):
    cells = load_recorded()
    assert sum(cells[name, temperature].drafted for temperature in TEMPERATURES) >= 5_000


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_no_proposer_falls_below_its_record(name, temperature, batch):
    recorded, found = load_recorded()[name, temperature], along(name, temperature, batch)
    assert len(found.by_position) == len(recorded.by_position)
    assert found.rate >= recorded.rate - TOLERANCE
    assert found.mean_length >= recorded.mean_length - TOLERANCE
    for position, (now, then) in enumerate(zip(found.by_position, recorded.by_position, strict=True)):
        assert now >= then - TOLERANCE, (position, astuple(found), astuple(recorded))


def test_hidden_states_of_the_neighbouring_row_are_noticed():
    """Negative control: what is read one row late costs the speculator far more than the tolerance."""
    shifted = [row.roll(1, 0) for row in rows_of(0.0)]
    found = measure(proposer("speculator"), texts_of(0.0), shifted, NUM_GUESSES, 8, target().model.vocab_size)
    recorded = load_recorded()["speculator", 0.0]
    assert found.by_position[0] < recorded.by_position[0] - 5 * TOLERANCE
    assert found.mean_length < recorded.mean_length - 5 * TOLERANCE
