"""Rows of a tensor as numpy arrays, worked on by several threads: for what numpy does faster than torch. It does not know what is done."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating[Any]]
_T = TypeVar("_T")

# Elements of a chunk, at least; calls cost more than the work on fewer.
_CHUNK_ELEMENTS = 131_072
# So many, for threads that are held up.
_CHUNKS_PER_THREAD = 4


def map_chunks(rows: Tensor, work: Callable[[Floats, slice], _T]) -> list[_T]:
    """Calls `work` with chunks of the rows, on as many threads as torch has: numpy lets go of the interpreter while it computes.

    Args:
        rows: [R, V] floating point, on the processor.
        work: gets [C, V] and which rows these are. Float32 and float64 are not copied: what it changes is changed.

    Returns:
        What `work` returns, in the order of the rows.
    """
    num_rows, num_ids = rows.shape
    num_threads = torch.get_num_threads()
    height = max(1, _CHUNK_ELEMENTS // num_ids, -(-num_rows // (_CHUNKS_PER_THREAD * num_threads)))
    chunks = [slice(start, start + height) for start in range(0, num_rows, height)]

    def run(chunk: slice) -> _T:
        with np.errstate(all="ignore"):  # rows may hold anything
            return work(_as_floats(rows[chunk].detach()), chunk)

    return list(_pool(num_threads).map(run, chunks)) if len(chunks) > 1 else [run(chunk) for chunk in chunks]


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "rows")


def _as_floats(rows: Tensor) -> Floats:
    if rows.dtype is torch.bfloat16:  # the upper half of a float32
        return (rows.view(torch.uint16).numpy().astype(np.uint32) << np.uint32(16)).view(np.float32)
    # Not by torch, which would start threads of its own for each of ours.
    return rows.numpy().astype(np.float32) if rows.dtype is torch.float16 else rows.numpy()
