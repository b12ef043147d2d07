"""Loads a `transformers` model so that its attention is ours, and sizes its cache. It does not run the model beyond a probe."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from shared.engine.attention import IMPLEMENTATION, register
from shared.engine.decoder_layer import pack
from shared.engine.head_input import head_width
from shared.engine.kv_cache import LayerShape
from shared.engine.model_checks import check_class, check_config, max_model_len, probe
from shared.engine.weights import Weights
from shared.errors import UnsupportedModel

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

OnProgress = Callable[[float, str], None]
"""Told how far loading is, as a fraction of its steps, and what comes next."""


def _unheard(_fraction: float, _what: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run over a paged cache.

    Args:
        model: in evaluation mode, attention set to ours.
        name: hub id or directory, as given.
        vocab_size: width of the logits; may exceed the tokenizer's ids.
        max_model_len: longest sequence, in tokens.
        eos_token_ids: what the model ends a text with, from its generation configuration.
        dtype: of weights and cache.
        device: of weights and cache.
        layers: what each layer stores per token.
        hidden_size: numbers that the head reads for a row; 0: there are none to be had.
    """

    model: PreTrainedModel
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerShape, ...]
    hidden_size: int = 0

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        return len(self.layers)


def load(name_or_dir: str, dtype: str = "auto", device: str = "cpu", on_progress: OnProgress = _unheard, weights: Weights = "native") -> LoadedModel:
    """Loads a model from the hub or a directory, and packs its weights: safetensors only, no code from the repository.

    Args:
        name_or_dir: hub id or local directory.
        dtype: "float64", "float32", "bfloat16" or "auto" (as stored).
        device: "cpu", "cuda" or "cuda:n".
        on_progress: called a few times on this thread.
        weights: `native` as stored, or `int8`, rounded: for a draft, whose guesses are verified.

    Raises:
        UnsupportedModel: it cannot be found, read or served; the text says which and why.
    """
    target = device_of(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    on_progress(0.0, "reading the configuration")
    try:
        config = AutoConfig.from_pretrained(name_or_dir, trust_remote_code=False)
    except Exception as error:  # whatever foreign code raises, the operator gets one sentence and the log gets the cause
        raise _unreadable(name_or_dir, "its configuration cannot be read", error) from error
    with _named(name_or_dir):
        check_config(config)
        check_class(_model_class(config))
    register()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # progress goes through the callback; bars would tear the log
    on_progress(0.1, "reading the weights")
    try:
        outcome: Any = AutoModelForCausalLM.from_pretrained(
            name_or_dir,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, loading = outcome
        on_progress(0.8, f"moving the weights to {target}")
        model = model.to(target)
    except Exception as error:
        raise _unreadable(name_or_dir, "its weights cannot be loaded from safetensors files", error) from error
    if loading["missing_keys"]:
        some = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UnsupportedModel(f"{name_or_dir}: its files lack {len(loading['missing_keys'])} of the model's tensors, such as {some}")
    on_progress(0.9, "checking the model")
    loaded = wrap(model, name_or_dir)
    on_progress(0.95, "packing the weights")
    with _named(name_or_dir):
        pack(model, weights)
    on_progress(1.0, "loaded")
    return loaded


def wrap(model: PreTrainedModel, name: str) -> LoadedModel:
    """Checks a model that has been built already and sets its attention to ours.

    Raises:
        UnsupportedModel: it cannot be served; the text says why.
    """
    register()
    with _named(name):
        check_config(model.config)
        check_class(type(model))
        model.train(False).requires_grad_(False)
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            layers, vocab_size = probe(model)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"a forward pass with the paged attention fails: {_first_line(error)}") from error
    return LoadedModel(
        model=model,
        name=name,
        vocab_size=vocab_size,
        max_model_len=max_model_len(model.config),
        eos_token_ids=_eos_token_ids(model),
        dtype=model.dtype,
        device=model.device,
        layers=layers,
        hidden_size=head_width(model),
    )


def fit_blocks(available_bytes: int, fraction: float, block_bytes: int, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks that fit into a share of the memory, and no more than could ever be used at once.

    Args:
        available_bytes: from `available_memory`, after the weights are loaded.
        fraction: share of it to use, in (0, 1].
        block_bytes: from `kv_cache.bytes_per_block`.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens of the longest sequence.

    Raises:
        UnsupportedModel: not even one block fits.
    """
    usable = max_num_seqs * -(-max_model_len // block_size)
    fitting = int(available_bytes * fraction) // block_bytes
    if fitting < 1:
        raise UnsupportedModel(f"no KV block of {block_bytes} bytes fits into {fraction:.0%} of {available_bytes} bytes of memory")
    return min(fitting, usable)


def available_memory(device: torch.device) -> int:
    """Memory of the device that is free now, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def device_of(text: str) -> torch.device:
    """The device that is meant by `cpu`, `cuda`, `cuda:n`, or by `auto`: a GPU if there is one.

    Raises:
        UnsupportedModel: it means none, or that one is not there.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UnsupportedModel(f"device {text!r} is not cpu, cuda or cuda:n")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UnsupportedModel(f"device {text!r} is not there: this PyTorch sees {count} CUDA devices")
    return torch.device(text)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    try:
        return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    except KeyError as error:
        raise UnsupportedModel(f"transformers has no causal language model of type {config.model_type}") from error


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error.__cause__


def _unreadable(name: str, what: str, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(f"{name}: {what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
