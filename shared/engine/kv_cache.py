"""The paged KV cache: two tensors per layer, addressed by slot. It does not know which sequence owns a slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token leaves in the cache of one layer. The dimensions of keys and values differ in some models."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Memory that one block takes over all layers, in bytes."""
    return block_size * dtype.itemsize * sum(layer.values_per_token for layer in layers)


class PagedKVCache:
    """Keys and values of all layers, each `[num_blocks, block_size, num_kv_heads, dim]`.

    A slot is `block * block_size + offset`: the same number in every layer.

    Args:
        layers: shape of each layer's entries.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        dtype: of the entries; the model's own.
        device: where the tensors live.
    """

    def __init__(self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.keys = [torch.empty(num_blocks, block_size, layer.num_kv_heads, layer.key_dim, dtype=dtype, device=device) for layer in layers]
        self.values = [torch.empty(num_blocks, block_size, layer.num_kv_heads, layer.value_dim, dtype=dtype, device=device) for layer in layers]
        # The same memory by slot: [num_blocks * block_size, num_kv_heads, dim].
        self._keys_by_slot = [keys.flatten(0, 1) for keys in self.keys]
        self._values_by_slot = [values.flatten(0, 1) for values in self.values]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.keys)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores one token per slot.

        Args:
            layer: index of the layer.
            slots: [num_tokens] int64, no slot twice.
            keys: [num_tokens, num_kv_heads, key_dim].
            values: [num_tokens, num_kv_heads, value_dim].
        """
        self._keys_by_slot[layer].index_copy_(0, slots, keys)
        self._values_by_slot[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values in `slots`, [num_tokens] int64 or a run: [num_tokens, num_kv_heads, dim] each, of a run not copied."""
        keys, values = self._keys_by_slot[layer], self._values_by_slot[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        return keys.index_select(0, slots), values.index_select(0, slots)
