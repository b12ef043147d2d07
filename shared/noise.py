"""Randomness as a pure function of (key, position, token id): the counter-based generator and the noise made of it.

Nothing here knows who draws or why; `shared.picking` and the ratio test decide that.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from shared.digest import splitmix64

_LOW_32 = (1 << 32) - 1
_WRAP_64 = 1 << 64


def noise_key(seed: int) -> int:
    """Key of a seed's noise: odd, with well mixed bits.

    Args:
        seed: uint64.

    Returns:
        uint64.
    """
    return splitmix64(seed) | 1


def derive_key(seed: int, label: str, nonce: int = 0) -> int:
    """Key of a stream of its own, from which the seed cannot be recovered.

    The first 8 bytes, little-endian, of BLAKE2b(nonce) keyed with the seed and personalised with the label, lowest bit set. It may serve
    as a key as it is, or as a seed to derive further.

    Args:
        seed: uint64.
        label: what the stream is for, at most 16 ASCII characters, e.g. `draft` or `accept`.
        nonce: uint64; another nonce gives an unrelated stream.

    Returns:
        uint64, odd.
    """
    mixed = hashlib.blake2b(nonce.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little"), person=label.encode("ascii"))
    return int.from_bytes(mixed.digest(), "little") | 1


def key_tensor(keys: Iterable[int], device: torch.device | str = "cpu") -> Tensor:
    """Keys as a tensor: [N] int64 with the bits of the uint64 keys."""
    return torch.tensor([key - _WRAP_64 if key >> 63 else key for key in keys], dtype=torch.int64, device=device)


def squares32(counters: Tensor, keys: Tensor) -> Tensor:
    """Squares, a counter-based generator (Widynski 2020, "Squares: A Fast Counter-Based RNG"), four rounds.

    Args:
        counters: int64 with the bits of uint64 counters; not changed.
        keys: int64 with the bits of uint64 keys; broadcasts against `counters`.

    Returns:
        int64 in 0..2^32-1, of the broadcast shape.
    """
    first = counters * keys  # int64 arithmetic wraps, as the method asks
    second = first + keys
    state = torch.addcmul(first, first, first)
    scratch = torch.empty_like(state)
    for addend in (second, first):
        _swap_halves(state, scratch)
        torch.addcmul(addend, state, state, out=state)
    _swap_halves(state, scratch)
    torch.addcmul(second, state, state, out=state)
    return _high_half(state, out=state)


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens at positions; the three broadcast against each other.

    The 2^32 values are finite: `GUMBEL_MIN` to `GUMBEL_MAX`. In float32 the uniform would round to 1 about once in 2^25 draws and the noise to +inf.

    Args:
        keys: int64 with the bits of uint64 keys.
        positions: int64 index of the picked token in the whole sequence, below 2^31.
        token_ids: int64 in 0..2^32-1.

    Returns:
        float64.
    """
    return gumbel_of(squares32((positions << 32) | token_ids, keys))


def gumbel_of(words: Tensor) -> Tensor:
    """Maps random words (int64 in 0..2^32-1) to Gumbel noise, float64, monotonically."""
    return _unit(words).log_().neg_().log_().neg_()


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """One uniform per key and position: (word + 0.5) / 2^32, float64, never 0 or 1. The two broadcast against each other."""
    return _unit(squares32(positions << 32, keys))


def _unit(words: Tensor) -> Tensor:
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _high_half(state: Tensor, out: Tensor) -> Tensor:
    # The shift of an int64 is arithmetic: the mask takes the copies of the sign bit away.
    return torch.bitwise_right_shift(state, 32, out=out).bitwise_and_(_LOW_32)


def _swap_halves(state: Tensor, scratch: Tensor) -> None:
    _high_half(state, out=scratch)
    state.bitwise_left_shift_(32).bitwise_or_(scratch)


GUMBEL_MIN = float(gumbel_of(torch.tensor(0)))
GUMBEL_MAX = float(gumbel_of(torch.tensor(_LOW_32)))
