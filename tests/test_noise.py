"""The counter-based generator and what is made of it."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.digest import splitmix64
from shared.noise import GUMBEL_MAX, GUMBEL_MIN, derive_key, gumbel, gumbel_of, key_tensor, noise_key, squares32, uniforms
from tests.support.draws import uniform

UINT64 = st.integers(0, 2**64 - 1)
KNOWN_KEY = 0xBDD732262FEB6E95


def squares_in_plain_integers(counter: int, key: int) -> int:
    mask = 2**64 - 1
    y = counter * key & mask
    z = y + key & mask
    x = y
    for addend in (y, z, y):
        x = x * x + addend & mask
        x = (x >> 32) | (x << 32) & mask
    return (x * x + z & mask) >> 32


def test_a_seed_becomes_an_odd_mixed_key():
    assert noise_key(42) == splitmix64(42) | 1 == KNOWN_KEY


@pytest.mark.parametrize(
    ("position", "token_id", "word"),
    [(0, 0, 0x0B3B3639), (0, 1, 0xA7C14C28), (7, 0, 0x322B1341), (7, 49151, 0x6CF14BA2), (131071, 151935, 0xC3B3BD50)],
)
def test_squares_gives_the_known_words(position, token_id, word):
    counter = torch.tensor([position << 32 | token_id])
    assert squares32(counter, key_tensor([KNOWN_KEY])).item() == word


@given(counters=st.lists(UINT64, min_size=1, max_size=40), key=UINT64)
def test_squares_wraps_like_unsigned_integers(counters, key):
    words = squares32(key_tensor(counters), key_tensor([key])).tolist()
    assert words == [squares_in_plain_integers(counter, key) for counter in counters]


def test_squares_leaves_its_counters_and_keys_alone():
    counters, keys = torch.arange(100), key_tensor([noise_key(1)])
    squares32(counters, keys)
    assert counters.equal(torch.arange(100))
    assert keys.equal(key_tensor([noise_key(1)]))


def test_every_word_gives_finite_noise():
    extremes = gumbel_of(torch.tensor([0, 2**32 - 1]))
    assert extremes.dtype == torch.float64
    assert extremes.isfinite().all()
    assert extremes.tolist() == [GUMBEL_MIN, GUMBEL_MAX]
    # The same with float32 uniforms is not: this is why they are float64.
    assert not torch.tensor(1 - 0.5 / 2**32, dtype=torch.float32).log().neg().log().neg().isfinite()


def test_noise_follows_its_formula_and_grows_with_the_word():
    words = torch.tensor(sorted({0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1, *(k * 77_777_777 for k in range(55))}))
    noise = gumbel_of(words).tolist()
    assert noise == pytest.approx([-math.log(-math.log((word + 0.5) / 2**32)) for word in words.tolist()], rel=1e-12)
    assert noise == sorted(noise)


def test_noise_is_keyed_by_seed_position_and_token_alone():
    keys, positions = key_tensor([noise_key(1), noise_key(2)]), torch.tensor([5, 9])
    together = gumbel(keys[:, None], positions[:, None], torch.arange(50))
    for row in range(2):
        for token_id in (0, 17, 49):
            alone = gumbel(keys[row], positions[row], torch.tensor(token_id))
            assert together[row, token_id] == alone
    assert together.unique().numel() == together.numel()


def test_noise_is_gumbel_distributed():
    # Kolmogorov-Smirnov on 1e5 fixed draws, false alarm rate 1e-4: the critical value is 2.23 / sqrt(n).
    num_draws = 100_000
    noise = gumbel(key_tensor([noise_key(3)]), torch.tensor([11]), torch.arange(num_draws))
    cdf = torch.exp(-torch.exp(-noise)).sort().values
    steps = torch.arange(num_draws + 1, dtype=torch.float64) / num_draws
    assert max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()) < 2.23 / num_draws**0.5
    # Negative control: twice as large noise is told apart.
    wrong = torch.exp(-torch.exp(-2 * noise)).sort().values
    assert (wrong - steps[:-1]).abs().max() > 2.23 / num_draws**0.5


def test_uniforms_stay_inside_the_unit_interval_and_agree_one_by_one():
    keys, positions = key_tensor([noise_key(5)]), torch.arange(100)
    many = uniforms(keys, positions)
    assert many.dtype == torch.float64
    assert many.min() > 0
    assert many.max() < 1
    assert many.tolist() == [uniform(noise_key(5), position) for position in range(100)]
    assert uniform(KNOWN_KEY, 7) == (0x322B1341 + 0.5) / 2**32


@given(seed=UINT64, nonce=UINT64)
def test_streams_of_a_seed_have_keys_of_their_own(seed, nonce):
    labels = ("draft", "accept", "residual", "plain")
    keys = {derive_key(seed, label, nonce) for label in labels} | {derive_key(seed, label, nonce ^ 1) for label in labels}
    assert len(keys) == 8
    assert all(key & 1 and 0 < key < 2**64 for key in keys)
    assert derive_key(seed, "draft", nonce) == derive_key(seed, "draft", nonce)


def test_a_derived_key_is_keyed_blake2b():
    digest = hashlib.blake2b(bytes(8), digest_size=8, key=(42).to_bytes(8, "little"), person=b"draft").digest()
    assert derive_key(42, "draft") == int.from_bytes(digest, "little") | 1
