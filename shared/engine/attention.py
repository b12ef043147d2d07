"""Paged attention, and the seam through which `transformers` models come to use it. It does not know which model it serves.

A model calls the function registered under `IMPLEMENTATION` once per layer; that hands the call to the `attend` argument
of the forward pass. No mask is built for an implementation without a mask function, and no `transformers` cache is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from shared.engine.forward_batch import ForwardBatch, SpanGroup
from shared.engine.kv_cache import PagedKVCache
from shared.errors import UnsupportedModel

IMPLEMENTATION = "outrider_paged"

# What models pass on to every attention layer and what says nothing about the maths of a cached causal forward pass.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"}
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over all T rows of a forward pass.

    Args:
        layer: index of the layer.
        queries: [T, num_heads, key_dim].
        keys: [T, num_kv_heads, key_dim].
        values: [T, num_kv_heads, value_dim].
        scaling: factor of the scores; None: 1 / sqrt(key_dim).
        softcap: scores become softcap * tanh(score / softcap).
        window: a query at position i reads positions above i - window.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float | None
    softcap: float | None
    window: int | None


Attend = Callable[[AttentionCall], Tensor]
"""Computes one layer's attention: [T, num_heads, value_dim]."""


def write_then_attend(cache: PagedKVCache, batch: ForwardBatch, call: AttentionCall) -> Tensor:
    """One layer of a forward pass over the paged cache.

    Every row's keys and values are stored before any row attends: a row of an expanded sequence reads what the rows before
    it have written a moment ago, through the block table that they share.
    """
    write(cache, batch, call)
    return attend(cache, batch, call)


def write(cache: PagedKVCache, batch: ForwardBatch, call: AttentionCall) -> None:
    """Stores the keys and values of all rows."""
    cache.write(call.layer, batch.slots, call.keys, call.values)


def attend(cache: PagedKVCache, batch: ForwardBatch, call: AttentionCall) -> Tensor:
    """Attention of all rows, group by group, over what the cache holds: [T, num_heads, value_dim]."""
    if len(batch.groups) == 1 and isinstance(batch.groups[0].rows, slice):
        return _attend_group(cache, batch.groups[0], call)
    output = call.queries.new_empty(*call.queries.shape[:2], call.values.shape[-1])
    for group in batch.groups:
        output[group.rows] = _attend_group(cache, group, call)
    return output


def _attend_group(cache: PagedKVCache, group: SpanGroup, call: AttentionCall) -> Tensor:
    """Attention of one group's queries: [num_spans * num_queries, num_heads, value_dim]."""
    num_heads, key_dim = call.queries.shape[1:]
    num_kv_heads = call.keys.shape[1]
    queries_per_key = num_heads // num_kv_heads
    context = group.context(call.window, queries_per_key, call.queries.dtype)
    keys, values = cache.read(call.layer, context.slots if context.run is None else context.run)
    keys = keys.view(group.num_spans, context.width, num_kv_heads, key_dim).transpose(1, 2)
    values = values.view(group.num_spans, context.width, num_kv_heads, -1).transpose(1, 2)
    # Query heads that share a key head stand beside the queries, so that keys and values are never repeated:
    # [num_spans, num_kv_heads, num_queries * queries_per_key, key_dim].
    queries = call.queries[group.rows]
    if group.num_queries == 1:
        queries = queries.reshape(group.num_spans, num_kv_heads, queries_per_key, key_dim)
    else:
        queries = queries.reshape(group.num_spans, group.num_queries, num_kv_heads, queries_per_key, key_dim).transpose(1, 2).flatten(2, 3)
    if call.softcap is None:
        output = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=context.mask, scale=call.scaling)
    else:
        output = _softcapped(queries, keys, values, context.mask, call.scaling, call.softcap)
    if group.num_queries == 1:
        return output.reshape(-1, num_heads, values.shape[-1])
    output = output.view(group.num_spans, num_kv_heads, group.num_queries, queries_per_key, values.shape[-1])
    return output.transpose(1, 2).reshape(-1, num_heads, values.shape[-1])


def _softcapped(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float) -> Tensor:
    """Attention with capped scores (Gemma 2), float32 or wider from the scores to the weights. Shapes as in the caller."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).to(wide)
    scores = torch.tanh(scores * ((queries.shape[-1] ** -0.5 if scaling is None else scaling) / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1).to(values.dtype), values)


def paged_forward(model: PreTrainedModel, cache: PagedKVCache, batch: ForwardBatch) -> Tensor:
    """Runs a model whose attention implementation is ours.

    Returns:
        [len(batch.logit_rows), vocab] in the model's dtype.
    """
    return run_with(model, partial(write_then_attend, cache, batch), batch)


def run_with(model: PreTrainedModel, attend: Attend, batch: ForwardBatch) -> Tensor:
    """Runs a model with any attention in the place of the paged one; shapes as in `paged_forward`."""
    output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, logits_to_keep=batch.logit_rows, attend=attend)
    logits: Tensor = output.logits[0]
    return logits


def _from_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attend: Attend | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """What models call: heads before rows, and a batch of one, on both sides."""
    unknown = [name for name, argument in others.items() if argument is not None and argument is not False and name not in _HARMLESS]
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "dropout")
        raise UnsupportedModel(f"its attention uses {what}, which the paged attention does not know")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel("its attention is not causal: a token would have to be computed again for every token after it")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel("its attention layers have no index")
    if attend is None:
        raise UnsupportedModel("it does not pass keyword arguments on to its attention layers")
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = attend(AttentionCall(layer, queries, keys, values, scaling, softcap, sliding_window))
    return output[None], None


def register() -> None:
    """Makes the paged attention known to `transformers`; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _from_transformers)
