"""The noisy argmax on a processor: each row's winner, without the noise of tokens that cannot win. It does not know what the rows are for.

A token's noise grows with its random word. Nearly all of the cost is the 64-bit integer arithmetic of the words, for which numpy has the
better loops; the two logarithms in float64 are left for the few tokens that matter:

1. those whose word is among the largest, one in 2^b, whatever their score; the best of them sets a mark;
2. those that could beat the mark with any smaller word. Their score alone has to come close to it, and they are about 2^b at most: of
   more, one would have had a large word and set a higher mark.

Both bounds leave room for rounding, and the totals of what is left are those of the plain definition, bit for bit.
"""

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_of
from shared.row_chunks import Floats, map_chunks

UNUSABLE_ID = -1
"""Stands for the pick of a row that holds a NaN or +inf, or is -inf throughout."""

_Words = NDArray[np.uint64]
_Ids = NDArray[np.int64]
_Mask = NDArray[np.bool_]

# Words made at once: of a row of a large vocabulary, or of many rows of a small one. The buffers stay in the last-level cache.
_BLOCK_ELEMENTS = 131_072
# Words are made one by one where at most one token in so many is in reach of the best score.
_SPARSE_BELOW = 16
# That is judged by a sample of one id in so many: it only decides the way, not the result.
_SAMPLED_IN = 31
# More than any rounding error of a total, or of a logarithm.
_SLACK = 0.01
_SLACK_SHARE = 2.0**-50
_32, _33 = np.uint64(32), np.uint64(33)


def find_best(scores: Tensor) -> Tensor:
    """Argmax of every row; ties go to the lowest id.

    Args:
        scores: [R, V] floating point, on the processor.

    Returns:
        [R] int64; `UNUSABLE_ID` where nothing can be picked.
    """
    found = map_chunks(scores, lambda chunk, rows: _best(chunk))
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64)


def find_winners(scores: Tensor, keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Argmax of every row's score + `shared.noise.gumbel(key, position, id)`, added in float64; ties go to the lowest id.

    Args:
        scores: [R, V] floating point, on the processor.
        keys: uint64, one per row.
        positions: below 2^31, one per row.

    Returns:
        [R] int64; `UNUSABLE_ID` where nothing can be picked.
    """
    num_rows, num_ids = scores.shape
    if not num_rows:
        return torch.empty(0, dtype=torch.int64)
    multipliers = np.array(keys, dtype=np.uint64)[:, None]
    starts = (np.array(positions, dtype=np.uint64)[:, None] << _32) * multipliers  # wraps, as the generator asks
    found = map_chunks(scores, lambda chunk, rows: _find_contenders(chunk, rows.start, multipliers[rows], starts[rows]))
    contenders = _Contenders(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    rows = contenders.rows
    totals = contenders.scores + gumbel_of(torch.from_numpy((contenders.words >> _32).astype(np.int64))).numpy()
    best = np.full(num_rows, -np.inf)
    np.maximum.at(best, rows, totals)
    is_best = totals == best[rows]
    winners = np.full(num_rows, num_ids)
    np.minimum.at(winners, rows[is_best], contenders.ids[is_best])
    return torch.from_numpy(np.where(np.isfinite(contenders.tops), winners, UNUSABLE_ID))


class _Contenders(NamedTuple):
    """Tokens that may win, all else cannot; a token may stand here twice.

    Args:
        rows: [N]
        ids: [N]
        scores: [N]
        words: [N] their random words in the upper halves.
        tops: [R] the best score of each row; NaN where the row has one.
    """

    rows: _Ids
    ids: _Ids
    scores: NDArray[np.float64]
    words: _Words
    tops: NDArray[np.float64]


def _best(chunk: Floats) -> _Ids:
    ids = chunk.argmax(1)  # the first NaN, or the first of equals
    return np.where(np.isfinite(chunk[np.arange(len(ids)), ids]), ids, UNUSABLE_ID)


def _find_contenders(chunk: Floats, first_row: int, keys: _Words, starts: _Words) -> _Contenders:
    """Of a chunk [C, V]; keys [C, 1], and their products with the counters of id 0 [C, 1]."""
    num_ids = chunk.shape[1]
    tops = chunk.max(1).astype(np.float64)
    limits = _limits(tops + (GUMBEL_MIN - GUMBEL_MAX), chunk.dtype)
    sample = chunk[:, ::_SAMPLED_IN]
    dense = np.flatnonzero(np.count_nonzero(sample >= limits, axis=1) * _SPARSE_BELOW > sample.shape[1])
    num_bits = num_ids.bit_length() // 2 + 1
    late_rows, late_ids, late_words = _find_late(dense, num_ids, num_bits, keys, starts)
    late_scores = chunk[late_rows, late_ids].astype(np.float64)
    marks = np.full(len(chunk), -np.inf)
    np.maximum.at(marks, late_rows, late_scores - np.log(-np.log((late_words >> _32) * 2.0**-32 + 2.0**-33)))
    # These totals may differ in their last bits from those of the definition: nothing depends on that once the marks are lowered by so much.
    marks -= _SLACK + np.abs(marks) * _SLACK_SHARE
    limits[dense] = _limits(marks - _largest_noise_before(num_bits), chunk.dtype)[dense]
    able_rows, able_ids = np.divmod(np.flatnonzero(chunk >= limits), num_ids)
    able_keys = keys[able_rows, 0]
    counted = able_ids.astype(np.uint64) * able_keys + starts[able_rows, 0]
    able_words = _squares(counted, able_keys, [np.empty_like(counted) for _ in range(3)])
    rows, ids = np.concatenate((late_rows, able_rows)), np.concatenate((late_ids, able_ids))
    scores = np.concatenate((late_scores, chunk[able_rows, able_ids].astype(np.float64)))
    return _Contenders(rows + first_row, ids, scores, np.concatenate((late_words, able_words)), tops)


def _find_late(rows: _Ids, num_ids: int, num_bits: int, keys: _Words, starts: _Words) -> tuple[_Ids, _Ids, _Words]:
    """All tokens of some rows whose words begin with so many ones: their rows, their ids, their words."""
    height = max(1, _BLOCK_ELEMENTS // num_ids)
    first_late = np.uint64(2**64 - 2 ** (64 - num_bits))
    found: list[tuple[_Ids, _Ids, _Words]] = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))]
    for start in range(0, len(rows), height):
        block = rows[start : start + height]
        counted, shifted, upper, state, is_late = _local.buffers(len(block), num_ids)
        np.add(np.multiply(_all_ids(num_ids), keys[block], out=counted), starts[block], out=counted)
        words = _squares(counted, keys[block], (shifted, upper, state)).reshape(-1)
        places = np.flatnonzero(np.greater_equal(words, first_late, out=is_late.reshape(-1)))
        found.append((block[places // num_ids], places % num_ids, words[places]))
    late_rows, ids, late_words = zip(*found, strict=True)
    return np.concatenate(late_rows), np.concatenate(ids), np.concatenate(late_words)


def _limits(bounds: NDArray[np.float64], dtype: np.dtype[Any]) -> Floats:
    """Rounds bounds [B] down to limits [B, 1] for scores; only finite scores reach one, be it as low as -inf."""
    limits = np.nextafter((bounds - _SLACK).astype(dtype), dtype.type(-np.inf))
    clipped: Floats = np.maximum(limits, np.finfo(dtype).min)
    return clipped[:, None]


def _squares(counted: _Words, keys: _Words, scratch: Sequence[_Words]) -> _Words:
    """`shared.noise.squares32` of counters that are multiplied by their keys already; the word is the upper half of each number.

    Args:
        counted: any shape.
        keys: broadcasts against `counted`.
        scratch: three arrays of its shape, the last of them for the result.
    """
    shifted, upper, state = scratch
    np.add(np.multiply(counted, counted, out=state), counted, out=state)
    np.add(counted, keys, out=shifted)
    for addend in (shifted, counted, shifted):
        # With halves (l, u), exchanged and squared: (l 2^32 + u)^2 = u (u + l 2^33) modulo 2^64.
        np.right_shift(state, _32, out=upper)
        np.left_shift(state, _33, out=state)
        np.bitwise_or(state, upper, out=state)
        np.multiply(state, upper, out=state)
        np.add(state, addend, out=state)
    return state


@cache
def _largest_noise_before(num_bits: int) -> float:
    """The largest noise of a word that does not begin with so many ones."""
    return float(gumbel_of(torch.tensor(2**32 - 2 ** (32 - num_bits) - 1)))


@cache
def _all_ids(num_ids: int) -> _Words:
    return np.arange(num_ids, dtype=np.uint64)


class _Local(threading.local):
    """What a thread makes words in."""

    _words: tuple[_Words, ...] = ()
    _mask: _Mask = np.empty(0, np.bool_)

    def buffers(self, num_rows: int, num_ids: int) -> tuple[_Words, _Words, _Words, _Words, _Mask]:
        size = num_rows * num_ids
        if len(self._mask) < size:
            self._words = tuple(np.empty(size, np.uint64) for _ in range(4))
            self._mask = np.empty(size, np.bool_)
        first, second, third, fourth = (buffer[:size].reshape(num_rows, num_ids) for buffer in self._words)
        return first, second, third, fourth, self._mask[:size].reshape(num_rows, num_ids)


_local = _Local()
