"""What the policies are worth, on virtual time with the real engines: speedups over plain decoding as a simulation of the protocol has them.

T1 = Tv = 30 ms and 2 ms a guess unless said; fixed coins, so every figure is exact and repeatable. The thresholds are the project's targets.
"""

from dataclasses import replace

import pytest

from tests.support.coin_pair import Setting, speedup

MIXED = (0.5, 0.6, 0.7, 0.8, 0.9)
LONE = Setting(num_tokens=1500)
BATCH = Setting(16, MIXED, row_s=0.0001, draft_row_s=0.00002, num_tokens=250)
USELESS = (0.05,)


@pytest.mark.parametrize(("away_s", "at_least"), [(0.001, 2.7), (0.010, 2.35), (0.020, 2.15), (0.050, 1.65)])
def test_a_lone_sequence_is_that_much_faster_with_a_drafter(away_s, at_least):
    assert speedup(replace(LONE, away_s=away_s)) >= at_least


@pytest.mark.parametrize(("away_s", "at_least"), [(0.010, 1.05), (0.020, 1.05), (0.050, 1.2)])
def test_running_ahead_beats_one_round_at_a_time_over_a_network(away_s, at_least):
    ahead = replace(LONE, away_s=away_s)
    assert speedup(ahead) >= at_least * speedup(replace(ahead, window=ahead.max_draft_tokens))


@pytest.mark.parametrize(("num_sequences", "away_s", "at_least"), [(16, 0.001, 1.8), (16, 0.020, 1.7), (64, 0.001, 1.4), (64, 0.020, 1.4)])
def test_a_batch_of_mixed_acceptance_is_that_much_faster(num_sequences, away_s, at_least):
    assert speedup(replace(BATCH, num_sequences=num_sequences, away_s=away_s)) >= at_least


@pytest.mark.parametrize("away_s", [0.001, 0.020, 0.200])
@pytest.mark.parametrize("num_sequences", [1, 16, 64])
def test_a_useless_drafter_costs_next_to_nothing(num_sequences, away_s):
    assert speedup(replace(BATCH, num_sequences=num_sequences, acceptances=USELESS, away_s=away_s)) >= 0.975


@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.8])
def test_a_drafter_far_away_costs_next_to_nothing(acceptance):
    assert speedup(replace(LONE, acceptances=(acceptance,), away_s=0.2)) >= 0.99


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_on_one_machine_a_useless_drafter_is_hardly_asked(num_sequences):
    """Its window is a round: everything that is drafted is waited for."""
    shared = Setting(num_sequences, USELESS, 0.001, 0.190, 0.010, 0.050, 0.003, window=16, num_tokens=800)
    assert speedup(shared) >= 0.97


def test_on_one_machine_a_good_drafter_is_asked_for_as_much_as_pays():
    shared = Setting(1, (0.9,), 0.001, 0.186, 0.004, 0.050, 0.0, window=16, num_tokens=800)
    best = max(speedup(replace(shared, max_draft_tokens=count, window=count)) for count in (3, 4, 5, 6))
    assert speedup(shared) >= 0.95 * best


def test_where_every_token_costs_a_useless_drafter_costs_little_and_a_good_one_still_helps():
    steep = Setting(1, USELESS, 0.001, 0.030, 0.010, 0.002, 0.0, num_tokens=800)
    assert speedup(steep) >= 0.98
    assert speedup(replace(steep, acceptances=(0.9,))) >= 1.5
