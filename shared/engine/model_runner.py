"""The one place that runs a model. It does not know what the logits are for, and it owns the cache but not the blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.attention import paged_forward
from shared.engine.forward_batch import Span, build
from shared.engine.kv_cache import PagedKVCache
from shared.engine.model_loader import LoadedModel
from shared.errors import EngineFailure


class ModelRunner:
    """A model and its paged cache; who holds which block is the caller's business.

    Args:
        model: from `model_loader`.
        num_blocks: blocks in the cache.
        block_size: tokens per block.
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.cache = PagedKVCache(model.layers, num_blocks, block_size, model.dtype, model.device)
        self.num_forwards = 0

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Runs the tokens of all spans in one pass; each layer stores all keys and values before anything attends.

        Args:
            spans: any mix of prompts, pieces of prompts, single tokens and runs of guesses. Positions below a span's start
                must have been run before, or stand in an earlier or later span of the same call.

        Returns:
            [sum of num_logits, vocab] in span order, in the model's number type: who picks from them computes with more where it matters.

        Raises:
            EngineFailure: a token, a position or a block that the model or the cache does not have. Nothing was computed.
        """
        self._check(spans)
        batch = build(spans, self.cache.block_size, self.model.device)
        logits = paged_forward(self.model.model, self.cache, batch)
        self.num_forwards += 1
        return logits

    def _check(self, spans: Sequence[Span]) -> None:
        """On an accelerator a wrong index would take the whole process down, so none gets there."""
        num_blocks = len(self.cache.keys[0])
        for span in spans:
            if span.token_ids and (min(span.token_ids) < 0 or max(span.token_ids) >= self.model.vocab_size):
                raise EngineFailure(f"a token id is outside the vocabulary of {self.model.vocab_size}")
            if span.end > self.model.max_model_len:
                raise EngineFailure(f"position {span.end - 1} is beyond the model's length of {self.model.max_model_len}")
            if span.block_table and (min(span.block_table) < 0 or max(span.block_table) >= num_blocks):
                raise EngineFailure(f"a block is outside the pool of {num_blocks}")
