import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BartConfig,
    BertConfig,
    BloomConfig,
    Gemma3Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)
from transformers.models.bamba.modeling_bamba import BambaForCausalLM
from transformers.models.bart.modeling_bart import BartForConditionalGeneration
from transformers.models.bert.modeling_bert import BertLMHeadModel
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.jamba.modeling_jamba import JambaForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mamba.modeling_mamba import MambaForCausalLM
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

from shared.engine.forward_batch import Span
from shared.engine.kv_cache import LayerShape, bytes_per_block
from shared.engine.model_checks import max_model_len
from shared.engine.model_loader import available_memory, fit_blocks, load, wrap
from shared.engine.model_runner import ModelRunner
from shared.errors import UnsupportedModel
from tests.support.tiny_models import noisy_copy, random_model, tiny_llama

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MAMBA_LAYERS: dict[str, Any] = {"mamba_d_state": 4, "mamba_n_heads": 2, "mamba_d_head": 32, "attn_layer_indices": [1]}


def tiny_config(**changes):
    return LlamaConfig(**SIZES | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 2, "max_position_embeddings": 64} | changes)


class HasOwnAttention(LlamaForCausalLM):
    """Declares nothing unusual, but its second layer never asks AttentionInterface."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].self_attn = OwnAttention(config, 1)


class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        return self.o_proj(self.v_proj(hidden_states)), None


class HasHiddenState(LlamaForCausalLM):
    """Declares nothing unusual and uses AttentionInterface, but a causal convolution carries something between tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = ShiftedMLP(config.hidden_size)


class ShiftedMLP(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size) * 20)

    def forward(self, hidden_states):
        return torch.roll(hidden_states, 1, dims=1) @ self.weight


class KeepsKeywordsToItself(LlamaForCausalLM):
    def forward(self, input_ids, position_ids, use_cache, logits_to_keep, attend):
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)


REFUSED = {
    "mamba": (lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)), "cannot be rewound"),
    "jamba": (lambda: JambaForCausalLM(JambaConfig(**SIZES, num_experts=1, use_mamba_kernels=False)), "cannot be rewound"),
    "bamba": (lambda: BambaForCausalLM(BambaConfig(**SIZES, **MAMBA_LAYERS)), "cannot be rewound"),
    "lfm2": (lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])), "layers of type conv"),
    "bart": (lambda: BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1)), "encoder-decoder"),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)), "encoder-decoder"),
    "bert": (lambda: BertLMHeadModel(BertConfig(**{**SIZES, "is_decoder": False})), "not causal"),
    "bloom": (lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)), "an attention of its own"),
    "gpt_oss": (lambda: GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1)), "uses s_aux"),
    "ignores the interface": (lambda: HasOwnAttention(tiny_config()), "layers 1 do not call the attention"),
    "hidden state": (lambda: HasHiddenState(tiny_config()), "something besides keys and values"),
    "no keyword arguments": (lambda: KeepsKeywordsToItself(tiny_config()), "does not pass keyword arguments"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_model_that_cannot_be_rewound_or_paged_is_refused_with_the_reason(name):
    build, reason = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        wrap(build(), "some/model")
    assert str(refusal.value).startswith("some/model: ")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(), "cannot be rewound"),
        (JambaConfig(), "cannot be rewound"),
        (Qwen3NextConfig(), "layers of type linear_attention"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (T5Config(), "encoder-decoder"),
        (BartConfig(), "encoder-decoder"),
        (Gemma3Config(), "multimodal"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_hopeless_configuration_is_refused_before_any_weight_is_read(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(str(tmp_path))


@pytest.fixture
def saved(tmp_path):
    model = random_model("llama", dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path)
    return tmp_path


def test_loaded_model_equals_the_saved_one(saved):
    progress = []
    loaded = load(str(saved), "float64", on_progress=lambda fraction, what: progress.append((fraction, what)))
    logits = ModelRunner(loaded, 4, 4).forward([Span([3, 1, 4, 1, 5], 0, [2, 0], 5)])
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)(torch.tensor([[3, 1, 4, 1, 5]])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    fractions = [fraction for fraction, _ in progress]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids, loaded.num_layers) == (64, 1024, (2, 5), 2)


@pytest.mark.parametrize(
    ("asked", "got"), [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32), ("float64", torch.float64)]
)
def test_dtype_is_the_stored_one_or_the_one_asked_for(saved, asked, got):
    loaded = load(str(saved), asked)
    assert loaded.dtype == got
    assert ModelRunner(loaded, 2, 4).cache.keys[0].dtype == got


def test_missing_directory_is_told_in_a_sentence(tmp_path):
    with pytest.raises(UnsupportedModel, match="its configuration cannot be read") as refusal:
        load(str(tmp_path / "nothing"))
    assert "\n" not in str(refusal.value)


def damage_config(path):
    (path / "config.json").write_text("{")
    return "its configuration cannot be read"


def unknown_model_type(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    return "its configuration cannot be read"


def needs_remote_code(path):
    config = json.loads((path / "config.json").read_text())
    remote = {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.CustomModel"}}
    (path / "config.json").write_text(json.dumps(config | remote))
    (path / "custom.py").write_text("raise SystemExit('remote code was run')")
    return "its configuration cannot be read"


def remove_weights(path):
    (path / "model.safetensors").unlink()
    return "its weights cannot be loaded from safetensors files"


def pickle_weights(path):
    torch.save(random_model("llama").state_dict(), path / "pytorch_model.bin")
    return remove_weights(path)


def cut_weights(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return "its weights cannot be loaded from safetensors files"


def scramble_header(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 4096)
    return "its weights cannot be loaded from safetensors files"


def resize_layer(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    return "its weights cannot be loaded from safetensors files"


def add_layer(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return "its files lack 9 of the model's tensors"


@pytest.mark.parametrize(
    "damage",
    [
        damage_config,
        unknown_model_type,
        needs_remote_code,
        remove_weights,
        pickle_weights,
        cut_weights,
        scramble_header,
        resize_layer,
        add_layer,
    ],
)
def test_damaged_files_are_told_in_a_sentence(saved, damage):
    reason = damage(saved)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        load(str(saved))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        ("int8", "cpu", "dtype 'int8' is not one of auto, float64, float32, bfloat16"),
        ("auto", "tpu", "device 'tpu' is not cpu, cuda or cuda:n"),
        ("auto", "cpu:1", "is not cpu, cuda or cuda:n"),
        ("auto", "cuda:x", "is not cpu, cuda or cuda:n"),
        ("auto", "cuda:99", "device 'cuda:99' is not there: this PyTorch sees \\d+ CUDA devices"),
    ],
)
def test_impossible_dtype_or_device_is_refused(dtype, device, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        load("anything", dtype, device)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}, 32),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_length_stops_where_rotary_frequencies_would_change(rope, limit):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(rope_parameters={"rope_theta": 10_000.0, **rope})).double().eval()
    token_ids = [(7 * position) % 64 for position in range(limit)]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([token_ids[: length + 1]])).logits[0, -1] for length in range(limit)])
    loaded = wrap(model, "rope")
    assert loaded.max_model_len == limit
    runner = ModelRunner(loaded, 8, 16)
    actual = torch.cat([runner.forward([Span([token_id], position, [5, 1, 0, 7], 1)]) for position, token_id in enumerate(token_ids)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_model_without_a_stated_length_gets_a_default():
    assert max_model_len(PreTrainedConfig()) == 2048


def test_noisy_copy_is_close_but_not_equal():
    loaded = tiny_llama()
    noisy = noisy_copy(loaded, sigma=0.1, seed=1)
    span = Span(list(range(40)), 0, list(range(10)), 40)
    ours, theirs = (ModelRunner(model, 10, 4).forward([span]) for model in (loaded, noisy))
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    assert 0.5 < agreement < 1.0
    torch.testing.assert_close(ModelRunner(noisy_copy(loaded, 0.0, 1), 10, 4).forward([span]), ours, rtol=0, atol=0)


def test_block_size_in_bytes_counts_keys_and_values_of_all_layers():
    layers = [LayerShape(2, 16, 16), LayerShape(1, 8, 24)]
    assert bytes_per_block(layers, 4, torch.bfloat16) == 4 * 2 * (2 * 32 + 32)


def test_pool_is_fitted_to_memory_and_capped_by_what_can_be_used():
    assert fit_blocks(1000, 0.5, 100, 16, max_num_seqs=4, max_model_len=100) == 5
    assert fit_blocks(10**9, 0.5, 100, 16, max_num_seqs=4, max_model_len=100) == 4 * 7
    with pytest.raises(UnsupportedModel, match="no KV block of 100 bytes fits"):
        fit_blocks(150, 0.5, 100, 16, max_num_seqs=4, max_model_len=100)


def test_available_memory_is_some():
    assert available_memory(torch.device("cpu")) > 0
