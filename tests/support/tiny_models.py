"""Tiny random models, one per architecture whose attention differs, quick to build and exact in float64."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shared.engine.model_loader import LoadedModel, wrap

SLIDING_WINDOW = 8
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def tiny_llama(vocab: int = 64, seed: int = 0, dtype: torch.dtype = torch.float64, scale_head: float = 12.0) -> LoadedModel:
    """A random 2-layer Llama whose norms run in float64 too.

    The norms of `transformers` run in float32 whatever the model's dtype: where two passes differ by 1e-16 on either side of
    a rounding boundary, they turn it into 1e-8. That is rare, but tests that compare after every step would meet it.

    Args:
        vocab: width of the logits.
        seed: of the weights.
        dtype: of the weights.
        scale_head: factor of the output layer; the larger, the more peaked the distributions.
    """
    model = random_model("llama", vocab, seed, dtype, scale_head)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], child.variance_epsilon, dtype=dtype)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return wrap(model, f"tiny-llama-{seed}")


def noisy_copy(loaded: LoadedModel, sigma: float, seed: int) -> LoadedModel:
    """The same model with Gaussian noise on every matrix, `sigma` of its own spread: a draft model that is right at times."""
    model = copy.deepcopy(loaded.model)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += sigma * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return wrap(model, f"{loaded.name}-noisy")


def random_model(name: str, vocab: int = 64, seed: int = 0, dtype: torch.dtype = torch.float64, scale_head: float = 12.0) -> PreTrainedModel:
    """A random model of `ARCHITECTURES[name]`, not wrapped: its attention is still the one of `transformers`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[name](vocab)
        model.train(False)
        nn.Module.to(model, dtype)  # in place
        # Small weights would make every token look alike; norms and biases start as constants and would hide mistakes.
        for weight in model.parameters():
            weight.data = torch.randn_like(weight) * 0.1 + weight.data if weight.ndim == 1 else torch.randn_like(weight) * weight.shape[-1] ** -0.5
        head = model.get_output_embeddings().weight
        head.data *= 0.02 * head.shape[-1] ** 0.5 * scale_head
    return model


def _llama(vocab: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **_SIZES))


def _qwen2(vocab: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, **_SIZES))


def _qwen3(vocab: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, **_SIZES | {"head_dim": 32}))


def _mistral(vocab: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(vocab_size=vocab, sliding_window=SLIDING_WINDOW, **_SIZES))


def _gemma2(vocab: int) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=vocab,
            sliding_window=SLIDING_WINDOW,
            layer_types=layers,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=24,
            **_SIZES | {"head_dim": 32},
        )
    )


def _gemma3(vocab: int) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=vocab,
            sliding_window=SLIDING_WINDOW,
            layer_types=layers,
            query_pre_attn_scalar=24,
            **_SIZES | {"head_dim": 32, "num_hidden_layers": 3},
        )
    )


ARCHITECTURES: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
