"""A model that is a table: what follows depends on the last two tokens. Distributions of whole texts can be enumerated."""

from collections.abc import Sequence

import torch
from torch import Tensor


class TabularModel:
    """Logits for `num_ids` tokens, drawn once from a seed."""

    def __init__(self, num_ids: int, seed: int, scale: float = 1.2) -> None:
        self.num_ids = num_ids
        # Any context is a key of the table, tokens outside the vocabulary included: they share the last row and column.
        self._table = torch.randn(num_ids + 1, num_ids + 1, num_ids, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale

    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[number of texts, num_ids]; each text has at least two tokens."""
        context = torch.tensor([tuple(text[-2:]) for text in texts])
        context = torch.where((context >= 0) & (context < self.num_ids), context, self.num_ids)
        return self._table[context[:, 0], context[:, 1]]
