"""Which models can be served: decoder-only, every layer through our attention, no state but keys and values. It loads nothing.

What a model says about itself is checked first, so that most refusals come before any weight is read; then a forward pass
of three tokens is watched, so that a model that says nothing, or something wrong, is refused as well.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from shared.engine.attention import IMPLEMENTATION, AttentionCall, paged_forward, run_with
from shared.engine.forward_batch import ForwardBatch, Span, build
from shared.engine.kv_cache import LayerShape, PagedKVCache
from shared.errors import UnsupportedModel

_REWINDABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Rotary frequencies that change once the longest position of the batch passes a bound; below it they are constant.
_LENGTH_DEPENDENT_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
_DEFAULT_MODEL_LEN = 2048
# Share of the logits' spread by which a pass in pieces may differ from a pass in one. Rounding in bfloat16 gives a
# hundredth or two; a state that was lost between the pieces gives about one.
_MAX_PIECEWISE_ERROR = 0.3


def check_config(config: PreTrainedConfig) -> None:
    """Refuses what the configuration alone shows to be impossible.

    Raises:
        UnsupportedModel: with the reason.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder model; only decoder-only models can be served")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{config.model_type} is a multimodal model; only models of text alone can be served")
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    foreign = sorted({str(kind) for kind in layer_types} - _REWINDABLE_LAYERS)
    if foreign:
        raise UnsupportedModel(f"{config.model_type} has layers of type {', '.join(foreign)}, whose state cannot be rewound to an earlier length")


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Refuses what the model's class declares to be impossible.

    Raises:
        UnsupportedModel: with the reason.
    """
    if model_class._is_stateful:
        raise UnsupportedModel(f"{model_class.__name__} carries a recurrent state, which cannot be rewound to an earlier length")
    if not (model_class._supports_attention_backend and model_class._can_set_attn_implementation()):
        raise UnsupportedModel(f"{model_class.__name__} has an attention of its own, which cannot be replaced through AttentionInterface")


def max_model_len(config: PreTrainedConfig) -> int:
    """Positions that the model can be run for: its limit, or less where its rotary frequencies would change on the way.

    Dynamic NTK and LongRoPE choose frequencies by the longest position in the batch. Keys cached before such a change would
    be wrong after it, and a sequence would depend on its neighbours; up to the first change both are exact.
    """
    limit = getattr(config, "max_position_embeddings", None) or _DEFAULT_MODEL_LEN
    for rope in _rope_parameters(config):
        bound = _LENGTH_DEPENDENT_ROPE.get(str(rope.get("rope_type", "default")))
        if bound is not None:
            limit = min(limit, rope.get(bound) or getattr(config, bound, None) or limit)
    return int(limit)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return nested or [parameters]


def probe(model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """Watches a short forward pass.

    Returns:
        What each layer stores per token, and the width of the logits.

    Raises:
        UnsupportedModel: a layer does not come to our attention, or more than keys and values passes between tokens.
    """
    whole = _batch(model, [1, 2, 3], start=0)
    calls: dict[int, AttentionCall] = {}
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedModel("its attention implementation cannot be set")
    logits = run_with(model, lambda call: _record(calls, call), whole)
    missing = sorted(set(range(model.config.num_hidden_layers)) ^ set(calls))
    if missing:
        raise UnsupportedModel(f"its layers {', '.join(map(str, missing))} do not call the attention registered in AttentionInterface exactly once")
    layers = tuple(LayerShape(calls[layer].keys.shape[1], calls[layer].keys.shape[2], calls[layer].values.shape[2]) for layer in sorted(calls))
    _check_piecewise(model, layers, whole)
    return layers, logits.shape[-1]


def _record(calls: dict[int, AttentionCall], call: AttentionCall) -> Tensor:
    if call.layer in calls:
        raise UnsupportedModel(f"its layer {call.layer} attends more than once")
    calls[call.layer] = call
    return call.queries.new_zeros(*call.queries.shape[:2], call.values.shape[-1])


def _check_piecewise(model: PreTrainedModel, layers: tuple[LayerShape, ...], whole: ForwardBatch) -> None:
    """A model without hidden state gives the same logits whether its tokens come at once or in two passes."""
    expected = _run(model, layers, [whole])
    actual = _run(model, layers, [_batch(model, [1, 2], start=0), _batch(model, [3], start=2)])
    error = (actual - expected).square().mean().sqrt() / (expected - expected.mean()).square().mean().sqrt().clamp(min=1e-6)
    if not error <= _MAX_PIECEWISE_ERROR:
        change = f"its logits change by {float(error):.0%} when tokens are run in pieces"
        raise UnsupportedModel(f"{change}: something besides keys and values passes between them")


def _run(model: PreTrainedModel, layers: tuple[LayerShape, ...], batches: list[ForwardBatch]) -> Tensor:
    cache = PagedKVCache(layers, num_blocks=1, block_size=4, dtype=model.dtype, device=model.device)
    return [paged_forward(model, cache, batch) for batch in batches][-1].to(torch.float64)


def _batch(model: PreTrainedModel, token_ids: list[int], start: int) -> ForwardBatch:
    return build([Span(token_ids, start, [0], num_logits=1)], block_size=4, device=model.device)
