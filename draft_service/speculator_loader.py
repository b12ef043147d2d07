"""From the name of a speculator to its proposer. It knows files and models, and nothing of how guesses are made."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.mlp_speculator import lacks_vocabulary, load_speculator
from draft_service.speculator import SpeculatorProposer
from shared.default_model import resolve
from shared.engine.model_loader import DTYPES
from shared.engine.weights import Weights, kind_for, pack_linears
from shared.errors import UnsupportedModel

_FILES = ["config.json", "*.safetensors"]
_SHIPPED = Path(__file__).parent / "speculators"


def load_proposer(name_or_dir: str, target: str, dtype: str, threads: int, weights: Weights) -> tuple[SpeculatorProposer, str]:
    """Loads a speculator and packs its weights.

    Args:
        name_or_dir: hub id, directory, or name of a speculator that comes with the package.
        target: model whose embedding and head it shares if it has none; empty: the `target` in its configuration.
        dtype: `auto` (as stored), `float64`, `float32` or `bfloat16`.
        threads: CPU threads; 0 uses every core.
        weights: `native` or `int8`, of the linear layers.

    Returns:
        The proposer, and the fingerprint of the tokenizer that it was made for; empty if its configuration does not say.

    Raises:
        UnsupportedModel: it, or the target, cannot be found, read or used.
    """
    torch.set_num_threads(threads or os.cpu_count() or 1)
    directory = _find(name_or_dir)
    vocabulary: tuple[Tensor | None, Tensor | None] = (None, None)
    said = json.loads((directory / "config.json").read_text(encoding="utf-8")) if (directory / "config.json").exists() else {}
    if lacks_vocabulary(directory):
        target = target or str(said.get("target", ""))
        if not target:
            raise UnsupportedModel(f"{name_or_dir}: it has no embedding and head of its own, and names no target; --speculator-target does")
        vocabulary = _vocabulary_of(target)
    speculator = load_speculator(directory, DTYPES.get(dtype), *vocabulary)
    kind = kind_for(speculator, weights)
    if kind is not None:
        pack_linears(speculator, kind)
    return SpeculatorProposer(speculator, name_or_dir), str(said.get("tokenizer_fingerprint", ""))


def _find(name_or_dir: str) -> Path:
    for directory in (Path(name_or_dir), _SHIPPED / name_or_dir):
        if directory.is_dir():
            return directory
    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=_FILES))
    except Exception as error:  # whatever foreign code raises, the operator gets one sentence
        raise UnsupportedModel(f"{name_or_dir}: neither a directory nor a speculator of the hub: {str(error).splitlines()[0]}") from error


def _vocabulary_of(target: str) -> tuple[Tensor, Tensor]:
    """A model's embedding and head, [vocab_size, hidden_size] each."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(resolve(target), dtype="auto", use_safetensors=True, trust_remote_code=False)
        embedding: Tensor = model.get_input_embeddings().weight
        head: Tensor = model.get_output_embeddings().weight
    except UnsupportedModel:
        raise
    except Exception as error:  # as above
        raise UnsupportedModel(f"{target}: its embedding and head cannot be read: {str(error).splitlines()[0]}") from error
    return embedding.detach(), head.detach()
