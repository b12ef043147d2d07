"""What `bench.overhead` takes off a round: the passes of the draft that were made and awaited."""

import pytest

from bench.overhead import Result, Segment, summarise, to_rounds

GROWN = {
    "rounds": 40.0,
    "proposals": 100.0,
    "passes": 100.0,
    "received": 6400.0,
    "overlapped": 0.0,
    "guesses": 6000.0,
    "verifications": 2400.0,
}


def test_counters_are_told_per_round_and_guesses_per_verification_that_had_some() -> None:
    assert to_rounds(GROWN) == {"proposals": 2.5, "passes": 2.5, "awaited": 2.5, "guesses": 2.5}


def test_passes_beside_the_targets_are_not_awaited() -> None:
    """Of two and a half passes a round, the guesses of two fifths came while the verifier computed."""
    assert to_rounds(GROWN | {"overlapped": 2560.0})["awaited"] == pytest.approx(1.5)


def test_nothing_is_awaited_where_nothing_was_drafted() -> None:
    assert to_rounds(dict.fromkeys(GROWN, 0.0)) == dict.fromkeys(("proposals", "passes", "awaited", "guesses"), 0.0)


def test_the_table_has_a_row_for_each_number_of_sequences() -> None:
    segment = Segment(3.0, 5.0, 4.0, 4.0, 3.0, 4.0, 4.0, 38.0)
    assert summarise([Result(count, (segment,), (segment,)) for count in (1, 64)]).row_count == 2
