"""Packed weights and the layer that runs on them: the same as the plain model but for rounding, and only where it is the same."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shared.engine.decoder_layer import DecoderLayer, pack, packed_layers
from shared.engine.forward_batch import Span
from shared.engine.model_loader import wrap
from shared.engine.model_runner import ModelRunner
from shared.engine.weights import Int8Gate, Int8Linear, PackedGate, PackedLinear, kind_for
from shared.errors import UnsupportedModel
from tests.support.tiny_models import ARCHITECTURES, random_model

VOCAB = 64
COMMON = ["llama", "qwen2", "qwen3", "mistral"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
_NO_BF16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=_NO_BF16)]


def tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(num_in, num_out, bias=True, dtype=torch.float32, seed=0):
    layer = nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.data = tensor(num_out, num_in, seed=seed, dtype=dtype) * num_in**-0.5
    return layer


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def run(model):
    """Prompts, a chunk, single tokens and runs, of sequences whose blocks lie apart."""
    runner = ModelRunner(model, 64, 4)
    blocks = list(range(64))
    random.Random(1).shuffle(blocks)
    token_ids = [(7 * position) % VOCAB for position in range(60)]
    logits = [runner.forward([Span(token_ids[:40], 0, blocks[:20], 40), Span(token_ids[:3], 0, blocks[20:30], 1)])]
    logits.append(runner.forward([Span(token_ids[40:45], 40, blocks[:20], 5), Span(token_ids[3:4], 3, blocks[20:30], 1)]))
    logits += [runner.forward([Span(token_ids[position : position + 1], position, blocks[:20], 1)]) for position in range(45, 50)]
    logits.append(runner.forward([Span(token_ids[50:52], 50, blocks[:20], 0)]))
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 130])
def test_packed_layer_equals_the_plain_one(dtype, num_rows):
    plain = linear(48, 80, dtype=dtype)
    packed = PackedLinear(plain.weight.detach(), plain.bias.detach())
    inputs, other = tensor(1, num_rows, 48, seed=1, dtype=dtype), tensor(1, num_rows, 80, seed=2, dtype=dtype)
    expected = functional.linear(inputs.double(), plain.weight.double(), plain.bias.double())
    assert error(packed(inputs), expected) < TOLERANCE[dtype]
    assert error(packed(inputs, "swish"), functional.silu(expected)) < TOLERANCE[dtype]
    assert error(packed.plus(inputs, other), expected + other) < TOLERANCE[dtype]
    assert error(packed.times(inputs, other), expected * other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_few_rows_of_a_large_layer_are_padded_without_a_trace(dtype, num_rows):
    plain = linear(512, 8192 * 4 // dtype.itemsize, dtype=dtype)
    packed = PackedLinear(plain.weight.detach(), plain.bias.detach())
    inputs, other = tensor(1, num_rows, 512, seed=1, dtype=dtype), tensor(1, num_rows, plain.out_features, seed=2, dtype=dtype)
    expected = plain(inputs)
    assert packed(inputs).shape == expected.shape
    assert error(packed(inputs), expected) < TOLERANCE[dtype]
    assert error(packed.plus(inputs, other), expected + other) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_few_rows_of_a_large_rounded_layer_are_padded_without_a_trace(num_rows):
    plain = linear(1024, 8192)
    rounded = Int8Linear(plain.weight.detach(), plain.bias.detach())
    inputs = tensor(1, 5, 1024, seed=1)
    assert torch.equal(rounded(inputs[:, :num_rows]), rounded(inputs)[:, :num_rows])


@pytest.mark.parametrize("bias", [False, True])
def test_rounded_layer_is_close_to_the_plain_one(bias):
    plain = linear(64, 80, bias)
    rounded = Int8Linear(plain.weight.detach(), plain.bias.detach() if bias else None)
    inputs, other = tensor(1, 9, 64, seed=1), tensor(1, 9, 80, seed=2)
    assert 1e-4 < error(rounded(inputs), plain(inputs)) < 0.02
    assert error(rounded.plus(inputs, other), plain(inputs) + other) < 0.02


def test_rounded_row_does_not_depend_on_its_neighbours():
    plain = linear(64, 80)
    rounded = Int8Linear(plain.weight.detach(), plain.bias.detach())
    inputs = tensor(1, 9, 64, seed=1)
    crowded = inputs.clone()
    crowded[0, 1:] *= 1e4
    assert torch.equal(rounded(crowded)[:, :1], rounded(inputs[:, :1]))


def test_rounded_row_of_zeros_gives_the_bias():
    plain = linear(64, 80)
    rounded = Int8Linear(plain.weight.detach(), plain.bias.detach())
    inputs = torch.cat([torch.zeros(1, 1, 64), tensor(1, 1, 64)], 1)
    assert torch.equal(rounded(inputs)[0, 0], plain.bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_leaves_the_weights_themselves_alone(dtype):
    """A tied embedding goes on using them."""
    plain = linear(64, 80, dtype=dtype)
    before = plain.weight.clone()
    Int8Linear(plain.weight.detach(), plain.bias.detach())
    assert torch.equal(plain.weight, before)


@pytest.mark.parametrize(("kind", "tolerance"), [(PackedGate, 1e-5), (Int8Gate, 0.03)])
def test_gate_is_the_product_of_both_layers(kind, tolerance):
    gate, up = linear(64, 96, bias=False), linear(64, 96, bias=False, seed=1)
    inputs = tensor(1, 5, 64, seed=2)
    assert error(kind(gate, up)(inputs), functional.silu(gate(inputs)) * up(inputs)) < tolerance


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
def test_no_rows_give_no_rows(kind):
    assert kind(torch.randn(80, 64), None)(torch.empty(1, 0, 64)).shape == (1, 0, 80)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_model_gives_the_same_logits(name, dtype):
    model = wrap(random_model(name, VOCAB, dtype=dtype), name)
    expected = run(model)
    pack(model.model)
    assert not [module for module in model.model.modules() if type(module) is nn.Linear]
    assert error(run(model), expected) < {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_layers_of_the_common_kind_are_taken_over_and_no_others(name):
    model = wrap(random_model(name, VOCAB, dtype=torch.float32), name)
    pack(model.model)
    num_ours = sum(isinstance(module, DecoderLayer) for module in model.model.modules())
    assert num_ours == (model.num_layers if name in COMMON else 0)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_rounded_model_is_close(name):
    model = wrap(random_model(name, VOCAB, dtype=torch.float32), name)
    expected = run(model)
    pack(model.model, "int8")
    assert {type(layer) for layer in packed_layers(model.model)} == {Int8Linear}
    actual = run(model)
    assert 1e-3 < error(actual, expected) < 0.1
    assert (actual.argmax(-1) == expected.argmax(-1)).double().mean() > 0.7


def _halved_residual(self, hidden_states, **arguments):
    return hidden_states + 0.5 * (LlamaDecoderLayer.forward(self, hidden_states, **arguments) - hidden_states)


def _doubled_values(self, hidden_states, **arguments):
    attend = arguments.pop("attend")

    def doubled(call):
        return 2 * attend(call)

    return LlamaDecoderLayer.forward(self, hidden_states, attend=doubled, **arguments)


def _larger_far_out(self, hidden_states, **arguments):
    factor = 1 + 0.01 * (arguments["position_ids"] // 48)[..., None]
    return hidden_states + factor * (LlamaDecoderLayer.forward(self, hidden_states, **arguments) - hidden_states)


def _attending_twice(self, hidden_states, **arguments):
    return LlamaDecoderLayer.forward(self, LlamaDecoderLayer.forward(self, hidden_states, **arguments), **arguments)


@pytest.mark.parametrize("forward", [_halved_residual, _doubled_values, _larger_far_out, _attending_twice])
def test_layer_of_the_same_parts_but_another_formula_stays_as_it_is(forward):
    plain = random_model("llama", VOCAB, dtype=torch.float32)
    model = wrap(plain, "other")
    plain.model.layers[1].__class__ = type("Other", (LlamaDecoderLayer,), {"forward": forward})
    expected = run(model)
    pack(model.model)
    assert [isinstance(layer, DecoderLayer) for layer in model.model.model.layers] == [True, False]
    assert error(run(model), expected) < 1e-5


def _with_gelu(layer):
    """Nearly the same as SiLU where its inputs are small, and nearly nothing beside the attention."""
    layer.mlp.act_fn = nn.GELU()
    layer.mlp.gate_proj.weight.data *= 0.05


def _with_a_weight_of_its_own(layer):
    layer.register_parameter("scale", nn.Parameter(torch.ones(64)))


@pytest.mark.parametrize("change", [_with_gelu, _with_a_weight_of_its_own])
@pytest.mark.parametrize("weights", ["native", "int8"])
def test_what_a_trial_within_rounding_would_not_notice_is_noticed(change, weights):
    plain = random_model("llama", VOCAB, dtype=torch.float32)
    change(plain.model.layers[1])
    pack(wrap(plain, "other").model, weights)
    assert [isinstance(layer, DecoderLayer) for layer in plain.model.layers] == [True, False]


def test_layer_that_is_never_run_is_packed_and_no_more():
    plain = random_model("llama", VOCAB, dtype=torch.float32)
    plain.spare = LlamaDecoderLayer(plain.config, 2).requires_grad_(False)
    pack(wrap(plain, "spare").model)
    assert type(plain.spare) is LlamaDecoderLayer
    assert type(plain.spare.mlp.up_proj) is PackedLinear


@pytest.mark.parametrize("trouble", [AttributeError("no such operator"), TypeError("another argument")])
def test_a_pytorch_without_these_kernels_leaves_the_weights_alone_and_says_so(monkeypatch, caplog, trouble):
    def gone(*_):
        raise trouble

    model = wrap(random_model("llama", VOCAB, dtype=torch.float32), "llama")
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", gone)
    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", gone)
    expected = run(model)
    pack(model.model)
    assert str(trouble) in caplog.text
    assert torch.equal(run(model), expected)
    with pytest.raises(UnsupportedModel, match="int8 weights need"):
        pack(model.model, "int8")


def test_float64_keeps_its_layers_and_cannot_be_rounded():
    model = wrap(random_model("llama", VOCAB), "llama")
    expected = run(model)
    pack(model.model)
    assert packed_layers(model.model) == []
    assert torch.equal(run(model), expected)
    assert kind_for(model.model, "native") is None
    with pytest.raises(UnsupportedModel, match="int8 weights need"):
        pack(model.model, "int8")


def test_original_weights_are_freed_but_for_a_tied_embedding():
    plain = random_model("qwen2", VOCAB, dtype=torch.float32)
    plain.lm_head.weight = plain.model.embed_tokens.weight
    tied, owned = plain.lm_head.weight, weakref.ref(plain.model.layers[0].mlp.up_proj.weight)
    alone = weakref.ref(plain.model.layers[1].self_attn.o_proj.weight)
    model = wrap(plain, "tied")
    expected = run(model)
    pack(model.model)
    gc.collect()
    assert owned() is None
    assert alone() is None
    assert model.model.model.embed_tokens.weight is tied
    assert error(run(model), expected) < 1e-5
