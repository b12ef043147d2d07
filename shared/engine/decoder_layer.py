"""A decoder layer of the common kind (Llama, Qwen, Mistral), on packed weights and with a third of the calls. It knows no model by name.

A layer of `transformers` makes some sixty small calls around its seven matrix products, each on its own; at one row they take a
sixth to a third of a step. This one joins what reads the same input, leaves activation, product and residual to the matrix
kernels, and turns queries and keys together.

Whether it may stand in for a layer is found by trial: it must have the same parts, hand the same queries, keys and values to the
attention and add the same to the hidden states, for a few tokens. What a trial within rounding could miss is looked at by itself:
the activation, weights of the layer's own, and whether it asks for positions. Any other layer stays as it is.
"""

import ctypes
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.engine.attention import AttentionCall, run_with
from shared.engine.forward_batch import Span, build
from shared.engine.model_checks import max_model_len
from shared.engine.weights import Linear, Weights, gate_of, join, kind_for, pack_linears

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# How far outputs may be apart, as a share of their size: rounding gives a tenth of it, another formula many times as much.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_INT8_TOLERANCE = 0.15
_NUM_TRIED = 4


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a layer handed to the attention, and what it added to the hidden states."""

    call: AttentionCall
    added: Tensor


class _Turn:
    """Cosines and signed sines as the layers need them, worked out once per forward pass and not once per layer."""

    def __init__(self) -> None:
        self._sin: Tensor | None = None
        self._cosines = self._sines = torch.empty(0)

    def __call__(self, heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Turns heads by their positions.

        Args:
            heads: [num_rows, num_heads, dim].
            position_embeddings: cosines and sines, [1, num_rows, dim] each.
        """
        cos, sin = position_embeddings
        half = sin.shape[-1] // 2
        if self._sin is not sin:  # the tensor is held, so that `is` means the same pass
            self._cosines, self._sines = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
            self._sin = sin
        return torch.addcmul(heads * self._cosines, heads.roll(half, -1), self._sines)


class _RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight in six calls, where the ready-made one takes a dozen."""

    def __init__(self, norm: nn.Module) -> None:
        weight: Any = norm.weight
        epsilon: Any = norm.variance_epsilon
        # sqrt(mean(x^2) + epsilon) = hypot(|x|, sqrt(epsilon * width)) / sqrt(width)
        self._weight = weight.detach().to(torch.float32) * len(weight) ** 0.5
        self._least = torch.tensor((epsilon * len(weight)) ** 0.5)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype; float32 in between."""
        wide = inputs.to(torch.float32)
        normed: Tensor = wide / torch.linalg.vector_norm(wide, 2, -1, keepdim=True).hypot_(self._least)
        return normed.mul_(self._weight).to(inputs.dtype)


class DecoderLayer(nn.Module):
    """Attention and gated feed-forward, each behind a norm and with a residual around it.

    Args:
        layer: of `transformers`, with the parts named above.
        call: what that layer hands to the attention: number and size of heads, scaling, window.
        turn: shared by all layers of the model.
        kind: of the linear layers.
    """

    def __init__(self, layer: nn.Module, call: AttentionCall, turn: _Turn, kind: type[Linear]) -> None:
        super().__init__()
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self._call = call
        self._num_queries, self._head_dim = call.queries.shape[1:]
        self._num_keys = call.keys.shape[1]
        self._turn = turn
        self._qkv = join([_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj")], kind)
        self._out = join([_linear(attention, "o_proj")], kind)
        self._gated = gate_of(kind)(_linear(mlp, "gate_proj"), _linear(mlp, "up_proj"))
        self._down = join([_linear(mlp, "down_proj")], kind)
        self._norm, self._mlp_norm = _RmsNorm(layer.get_submodule("input_layernorm")), _RmsNorm(layer.get_submodule("post_attention_layernorm"))
        self._query_norm, self._key_norm = (_RmsNorm(norm) if (norm := getattr(attention, name, None)) else None for name in ("q_norm", "k_norm"))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attend: Any, **_others: Any) -> Tensor:
        """[1, num_rows, width] -> the same. What else a model passes on says nothing that the trial has not settled.

        Parts are called by their `forward`, past the hooks of modules, which cost as much as a small operation.
        """
        num_rows = hidden_states.shape[1]
        num_turned = self._num_queries + self._num_keys
        heads = self._qkv.forward(self._norm(hidden_states)).view(num_rows, -1, self._head_dim)
        turned = heads[:, :num_turned]
        if self._query_norm is not None and self._key_norm is not None:
            turned = torch.cat([self._query_norm(turned[:, : self._num_queries]), self._key_norm(turned[:, self._num_queries :])], 1)
        turned = self._turn(turned, position_embeddings)
        call = self._call
        attended = attend(
            AttentionCall(
                call.layer,
                turned[:, : self._num_queries],
                turned[:, self._num_queries :],
                heads[:, num_turned:],
                call.scaling,
                call.softcap,
                call.window,
            )
        )
        hidden_states = self._out.plus(attended.reshape(1, num_rows, -1), hidden_states)
        return self._down.plus(self._gated.forward(self._mlp_norm(hidden_states)), hidden_states)


def pack(model: PreTrainedModel, weights: Weights = "native") -> None:
    """Packs a model's weights, in place, and puts our layers where they say the same; a model that cannot be packed stays as it is.

    Args:
        model: with our attention, checked.
        weights: `int8` rounds the weights of all linear layers: good enough for a draft, never for a target.

    Raises:
        UnsupportedModel: int8 weights were asked for where they cannot be had.
    """
    kind = kind_for(model, weights)
    if kind is None:
        return
    with torch.no_grad():
        _replace_layers(model, kind, _INT8_TOLERANCE if weights == "int8" else _TOLERANCE[model.dtype])
        pack_linears(model, kind)
        # What is left may be a view of the whole file, which would stay mapped for its sake.
        for weight in model.parameters():
            weight.data = weight.data.clone()
    _give_back()


def packed_layers(model: nn.Module) -> list[Linear]:
    """The layers that hold packed weights, each once."""
    return list(dict.fromkeys(module for module in model.modules() if isinstance(module, Linear)))


def _replace_layers(model: PreTrainedModel, kind: type[Linear], tolerance: float) -> None:
    places = {layer: (parent, name) for parent in model.modules() for name, layer in parent.named_children() if _has_the_parts(layer)}
    arguments = _arguments(model, list(places))
    places = {layer: place for layer, place in places.items() if layer in arguments}
    last = max_model_len(model.config) - 1
    hidden = torch.randn(1, _NUM_TRIED, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    turn = _Turn()
    while places:  # nothing holds on to a layer that has been replaced: its weights are freed before the next is packed
        layer, (parent, name) = places.popitem()
        passed_on = arguments.pop(layer)
        theirs = _try(layer, hidden, passed_on)
        if theirs is None or not _can_be_ours(layer, theirs.call, passed_on) or _asks_for_positions(layer, hidden, passed_on, theirs, last):
            continue
        ours = DecoderLayer(layer, theirs.call, turn, kind)
        if _is_the_same(_try(ours, hidden, passed_on), theirs, tolerance):
            setattr(parent, name, ours)


def _has_the_parts(layer: nn.Module) -> bool:
    parts = {name: {child for child, _ in part.named_children()} for name, part in layer.named_children()}
    if set(parts) != _PARTS or parts["self_attn"] not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or parts["mlp"] != _MLP:
        return False
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    linears = [attention.get_submodule(name) for name in _ATTENTION] + [mlp.get_submodule(name) for name in _MLP - {"act_fn"}]
    norms = [module for name, module in layer.named_modules() if name.endswith("norm")]
    if not all(type(linear) is nn.Linear for linear in linears) or not all(hasattr(norm, "variance_epsilon") for norm in norms):
        return False
    known = {id(weight) for linear in linears for weight in linear.parameters()} | {id(norm.weight) for norm in norms}
    return {id(weight) for weight in chain(layer.parameters(), layer.buffers())} == known and _is_swish(mlp.get_submodule("act_fn"))


def _is_swish(activation: nn.Module) -> bool:
    inputs = torch.linspace(-8, 8, 65)
    return torch.allclose(activation(inputs), nn.functional.silu(inputs), atol=1e-5)


def _arguments(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """What the model passes besides the hidden states to each of these layers that it runs, in a pass of a few tokens."""
    seen: dict[nn.Module, dict[str, Any]] = {}
    hooks = [layer.register_forward_hook(lambda module, _, arguments, __: seen.update({module: arguments}), with_kwargs=True) for layer in layers]
    try:
        tokens = Span(range(1, 1 + _NUM_TRIED), 5, [0, 1, 2], num_logits=1)
        run_with(model, _values_alone, build([tokens], block_size=4, device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _values_alone(call: AttentionCall) -> Tensor:
    """In the place of attention: every query gets its own token's value, enough to see what becomes of it."""
    return call.values.repeat_interleave(call.queries.shape[1] // call.keys.shape[1], 1)


def _try(layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> _Trial | None:
    """One pass through one layer; None where it gives more than hidden states, or attends not once.

    Hidden states are drawn: real ones hold a few values so large that nothing else would count.
    """
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return _values_alone(call)

    output = layer(hidden, **arguments | {"attend": attend})
    return _Trial(calls[0], output - hidden) if isinstance(output, Tensor) and len(calls) == 1 else None


def _asks_for_positions(layer: nn.Module, hidden: Tensor, arguments: dict[str, Any], near: _Trial, last: int) -> bool:
    """Whether position ids alone change anything, as where queries are scaled from some position on: ours gets their cosines and sines only."""
    moved = {name: torch.full_like(value, last) for name, value in arguments.items() if name == "position_ids" and value is not None}
    return not _is_the_same(_try(layer, hidden, arguments | moved), near, 0.0)


def _can_be_ours(layer: nn.Module, call: AttentionCall, arguments: dict[str, Any]) -> bool:
    head_dim = call.queries.shape[-1]
    embeddings = arguments.get("position_embeddings")
    attention = layer.get_submodule("self_attn")
    widths = [_linear(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    if widths != [heads[0].numel() for heads in (call.queries, call.keys, call.values)]:
        return False
    return call.values.shape == call.keys.shape and isinstance(embeddings, tuple) and embeddings[0].shape[-1] == head_dim and head_dim % 2 == 0


def _is_the_same(ours: _Trial | None, theirs: _Trial, tolerance: float) -> bool:
    if ours is None:
        return False
    pairs = [(ours.added, theirs.added)]
    pairs += [(getattr(ours.call, name), getattr(theirs.call, name)) for name in ("queries", "keys", "values")]
    return all(bool((actual - expected).norm() <= tolerance * expected.norm()) for actual, expected in pairs)


def _give_back() -> None:
    """Hands freed memory to the system, so that the cache can have it. glibc keeps half a gigabyte; others have no such call and no need."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    layer = parent.get_submodule(name)
    assert isinstance(layer, nn.Linear), "only layers with linear parts are taken over"
    return layer
