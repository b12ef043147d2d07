"""Hidden states as the bytes that cross the link, and back. It does not know where they come from or what reads them."""

import torch
from torch import Tensor

from shared.link import HiddenState

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_wire(rows: Tensor) -> list[HiddenState]:
    """Rows as they cross the link, in their own number type: nothing is rounded.

    Args:
        rows: [R, hidden_size], on any device; they cross to the host at once.
    """
    dtype = str(rows.dtype).removeprefix("torch.")
    assert dtype in _DTYPES, f"models compute in one of {', '.join(_DTYPES)}"
    data, size = rows.contiguous().cpu().view(torch.uint8).numpy().tobytes(), rows.shape[1] * rows.dtype.itemsize
    return [HiddenState(dtype, (rows.shape[1],), data[start : start + size]) for start in range(0, len(data), size)]


def to_rows(states: list[HiddenState], dtype: torch.dtype) -> Tensor:
    """[len(states), hidden_size] of a number type.

    Args:
        states: at least one, all of one shape.
        dtype: of the result.
    """
    return torch.stack([torch.frombuffer(bytearray(state.data), dtype=_DTYPES[state.dtype]).to(dtype) for state in states])
