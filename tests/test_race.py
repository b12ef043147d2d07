"""The fast noisy argmax picks what the plain definition picks, for every input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import race
from shared.noise import gumbel, key_tensor, noise_key
from shared.picking import search_all
from shared.race import UNUSABLE_ID, find_best, find_winners

INF = math.inf
WIDTHS = st.sampled_from([1, 2, 5, 8, 31, 32, 33, 257, 1000, 4097, 40_000])
SHAPES = st.sampled_from(["flat", "normal", "peaked", "rounded", "stairs", "few", "outliers", "huge", "tiny"])


def full_noisy_argmax(scores: torch.Tensor, keys: list[int], positions: list[int]) -> list[int]:
    """Noise for every token of every row, and the first of the best."""
    num_ids = scores.shape[1]
    winners = []
    for row, key, position in zip(scores, keys, positions, strict=True):
        totals = (row.double() + gumbel(key_tensor([key]), torch.tensor([position]), torch.arange(num_ids))).tolist()
        winners.append(totals.index(max(totals)) if math.isfinite(float(row.double().max())) else UNUSABLE_ID)
    return winners


def rows_of(shape: str, num_rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, width, dtype=torch.float64, generator=generator)
    match shape:
        case "flat":
            return torch.full_like(noise, 3.25)
        case "normal":
            return noise * 3
        case "peaked":
            return noise * 40
        case "rounded":
            return noise.round()
        case "stairs":  # ten nats up and down, so that tokens are at every distance from the bounds
            return (torch.arange(width) % 40).double() / 2 + noise * 0
        case "few":
            return torch.where(noise > 1.5, noise, -INF)
        case "outliers":  # within reach of the rest only with the largest noise there is
            scores = noise * 0
            scores[:, torch.randint(width, (1,), generator=generator)] = 22.0
            return scores
        case "huge":  # the noise is lost in rounding, all of it or nearly
            return noise.round() * 10.0 ** torch.randint(12, 18, (num_rows, 1), generator=generator)
        case _:
            return noise * 1e-300


@given(
    shape=SHAPES,
    width=WIDTHS,
    num_rows=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
    position=st.one_of(st.integers(0, 100), st.integers(2**31 - 5, 2**31 - 5)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=300, deadline=None)
def test_winners_are_those_of_the_plain_definition(shape, width, num_rows, seed, position, dtype):
    scores = rows_of(shape, num_rows, width, seed).to(dtype)
    keys, positions = [noise_key(seed + row // 2) for row in range(num_rows)], [position + row for row in range(num_rows)]
    expected = full_noisy_argmax(scores, keys, positions)
    assert find_winners(scores, keys, positions).tolist() == expected
    assert search_all(scores, key_tensor(keys), torch.tensor(positions)).tolist() == expected


@pytest.mark.parametrize("shape", ["flat", "normal", "peaked", "stairs", "outliers", "few"])
def test_a_large_vocabulary_is_searched_like_a_small_one(shape):
    """In several chunks, on several threads, out of a wider tensor, one row much like the other and not."""
    scores = rows_of(shape, 12, 151_940, seed=7).float()[:, :151_936]
    keys, positions = [noise_key(row // 5) for row in range(12)], [1000 + row % 5 for row in range(12)]
    assert find_winners(scores, keys, positions).tolist() == full_noisy_argmax(scores, keys, positions)
    assert find_best(scores).tolist() == scores.max(-1).indices.tolist()


@pytest.mark.parametrize("threshold", [0, 10**9], ids=["one by one", "all words"])
def test_both_ways_of_making_words_find_the_same(monkeypatch, threshold):
    scores = torch.cat([rows_of(shape, 3, 5000, seed=3) for shape in ("flat", "normal", "peaked", "few", "outliers")])
    keys, positions = [noise_key(row) for row in range(15)], list(range(15))
    monkeypatch.setattr(race, "_SPARSE_BELOW", threshold)
    assert find_winners(scores, keys, positions).tolist() == full_noisy_argmax(scores, keys, positions)


def test_tokens_at_every_distance_from_the_best_win_as_often_as_they_should():
    """20,000 rows in which only tokens that the bounds come near to have a chance; a bound too tight by a nat would lose hundreds of them."""
    num_rows = 20_000
    scores = torch.zeros(1, 300, dtype=torch.float64)
    scores[0, :6] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    keys, positions = [noise_key(row) for row in range(num_rows)], [9] * num_rows
    every = scores.expand(num_rows, 300)
    assert find_winners(every, keys, positions).equal(search_all(every, key_tensor(keys), torch.tensor(positions)))


def test_rows_without_a_pick_are_told_and_hurt_no_other():
    good = [0.5, -1.0, 2.0, -INF]
    bad = [[math.nan, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, math.nan], [INF, 0.0, 0.0, 0.0], [-INF] * 4, [math.nan] * 4, [INF, -INF, math.nan, 0.0]]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scores = torch.tensor([good, *bad, good], dtype=dtype)
        keys, positions = [noise_key(1)] * 8, [3] * 8
        alone = find_winners(scores[:1], keys[:1], positions[:1]).tolist()
        assert find_winners(scores, keys, positions).tolist() == [*alone, *[UNUSABLE_ID] * 6, *alone]
        assert search_all(scores, key_tensor(keys), torch.tensor(positions)).tolist() == [*alone, *[UNUSABLE_ID] * 6, *alone]
        assert find_best(scores).tolist() == [2, *[UNUSABLE_ID] * 6, 2]


@given(width=WIDTHS, seed=st.integers(0, 2**63 - 1), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=60, deadline=None)
def test_the_best_is_the_first_of_equals(width, seed, dtype):
    scores = torch.randint(-3, 3, (5, width), generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert find_best(scores).tolist() == [row.index(max(row)) for row in scores.tolist()]


def test_scores_are_not_changed_and_no_rows_are_no_work():
    scores = torch.randn(3, 500)
    before = scores.clone()
    find_winners(scores, [1, 3, 5], [0, 1, 2])
    find_best(scores)
    assert scores.equal(before)
    assert find_winners(torch.zeros(0, 5), [], []).tolist() == find_best(torch.zeros(0, 5)).tolist() == []
