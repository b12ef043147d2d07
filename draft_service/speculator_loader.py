"""From the name of a speculator to its proposer. It knows files and devices, and nothing of how guesses are made."""

import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from draft_service.mlp_speculator import load_speculator
from draft_service.speculator import SpeculatorProposer
from draft_service.target_vocabulary import vocabulary_of
from shared.engine.model_loader import DTYPES, device_of
from shared.engine.weights import Weights, kind_for, pack_linears
from shared.errors import UnsupportedModel

DEFAULT_SPECULATOR = "smollm2-135m-instruct-speculator"  # for the default target; comes with the package

_FILES = ["config.json", "*.safetensors"]
_SHIPPED = Path(__file__).parent / "speculators"


def load_proposer(name_or_dir: str, target: str, dtype: str, device: str, threads: int, weights: Weights) -> tuple[SpeculatorProposer, str]:
    """Loads a speculator and packs its weights.

    Args:
        name_or_dir: hub id, directory, or name of a speculator that comes with the package.
        target: model whose embedding and head it shares if it has none; empty: the `target` in its configuration.
        dtype: `auto` (as stored), `float64`, `float32` or `bfloat16`.
        device: `auto`, `cpu` or `cuda[:n]`.
        threads: CPU threads; 0 uses every core.
        weights: `native` or `int8`, of the linear layers.

    Returns:
        The proposer, and the fingerprint of the tokenizer that it was made for; empty if its configuration does not say.

    Raises:
        UnsupportedModel: it, or the target, cannot be found, read or used.
    """
    torch.set_num_threads(threads or os.cpu_count() or 1)

    def shared(named: str) -> tuple[Tensor, Tensor]:
        if not (target or named):
            raise UnsupportedModel(f"{name_or_dir}: it has no embedding and head of its own, and names no target; --speculator-target does")
        return vocabulary_of(target or named)

    speculator = load_speculator(_find(name_or_dir), DTYPES.get(dtype), shared).to(device_of(device))
    kind = kind_for(speculator, weights)
    if kind is not None:
        pack_linears(speculator, kind)
    return SpeculatorProposer(speculator, name_or_dir), speculator.config.tokenizer_fingerprint


def _find(name_or_dir: str) -> Path:
    for directory in (Path(name_or_dir), _SHIPPED / name_or_dir):
        if directory.is_dir():
            return directory
    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=_FILES))
    except Exception as error:  # whatever foreign code raises, the operator gets one sentence
        raise UnsupportedModel(f"{name_or_dir}: neither a directory nor a speculator of the hub: {str(error).splitlines()[0]}") from error
