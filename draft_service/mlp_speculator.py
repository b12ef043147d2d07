"""The MLP speculator: a few small layers that foresee several tokens from one hidden state of the target. It knows no sequences and no link.

Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv:2404.19124), in the form of the
published checkpoints (`ibm-ai-platform/*-accelerator`): head i reads the state of head i - 1 (the first one the target's hidden state) and the
token before the one that it foresees.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.errors import UnsupportedModel

_EPSILON = 1e-6
_PREFIX = "speculator."  # of the tensors in published files
_MAX_PREDICT = 64

VocabularyOf = Callable[[str], tuple[Tensor, Tensor]]
"""A model's embedding and head by its name, [vocab_size, hidden_size] each."""


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """Sizes of a speculator; names as in its `config.json`.

    Args:
        n_predict: tokens that it foresees, one head for each.
        inner_dim: width of its own state.
        emb_dim: width of the target's hidden state.
        vocab_size: ids that it knows.
        tie_weights: all heads share their parts; only the first projection is its own.
        scale_input: the hidden state is normalised first.
        project_vocabulary: embedding and head are as wide as the target's, `emb_dim`, with a projection between each and the state. Our
            extension, for a speculator that shares the target's own: a state behind an activation is next to never negative, what the
            target's head reads is as often as not, and a token's embedding says more to a layer that may mix its numbers.
        draft_vocab_size: ids that it can foresee, the only ones that its head has rows for; the file's `head_ids` says which. 0: all. Our
            extension too: most of the time of a small speculator goes into its head, and most text into few ids (Zhao et al. 2025, "FR-Spec").
        target: model that it was trained for; empty if the file does not say. Likewise `tokenizer_fingerprint`, of the link's handshake.
    """

    n_predict: int
    inner_dim: int
    emb_dim: int
    vocab_size: int
    tie_weights: bool = False
    scale_input: bool = False
    project_vocabulary: bool = False
    draft_vocab_size: int = 0
    target: str = ""
    tokenizer_fingerprint: str = ""

    @classmethod
    def read(cls, directory: Path) -> "SpeculatorConfig":
        """Reads `config.json`; an `inner_dim` of 0 stands for `emb_dim`, as in the published ones.

        Raises:
            UnsupportedModel: it cannot be read, or it is no speculator's.
        """
        try:
            given: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            sizes = {name: int(given[name]) for name in ("n_predict", "inner_dim", "emb_dim", "vocab_size")}
            draft_vocab_size = int(given.get("draft_vocab_size") or 0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnsupportedModel(f"{directory}: not the configuration of an MLP speculator: {error!r}") from error
        sizes["inner_dim"] = sizes["inner_dim"] or sizes["emb_dim"]
        if min(sizes.values()) < 1 or sizes["n_predict"] > _MAX_PREDICT:
            raise UnsupportedModel(f"{directory}: an MLP speculator has 1 to {_MAX_PREDICT} heads and no empty layers; this one says {sizes}")
        if not 0 <= draft_vocab_size <= sizes["vocab_size"]:
            raise UnsupportedModel(f"{directory}: it cannot foresee {draft_vocab_size} of {sizes['vocab_size']} ids")
        return cls(
            sizes["n_predict"],
            sizes["inner_dim"],
            sizes["emb_dim"],
            sizes["vocab_size"],
            tie_weights=bool(given.get("tie_weights", False)),
            scale_input=bool(given.get("scale_input", False)),
            project_vocabulary=bool(given.get("project_vocabulary", False)),
            draft_vocab_size=draft_vocab_size,
            target=str(given.get("target", "")),
            tokenizer_fingerprint=str(given.get("tokenizer_fingerprint", "")),
        )


class _Norm(nn.Module):
    """x / rms(x), with a scale and a shift per number or with neither."""

    def __init__(self, width: int, is_affine: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if is_affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if is_affine else None

    def forward(self, inputs: Tensor) -> Tensor:
        normed = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + _EPSILON)
        return normed if self.weight is None or self.bias is None else torch.addcmul(self.bias, self.weight, normed)


class MlpSpeculator(nn.Module):
    """The layers, with random weights; parameters are named as in the published files.

    Args:
        config: sizes.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        heads, inner = range(config.n_predict), config.inner_dim

        def shared(make: Any) -> list[nn.Module]:
            return [make()] * config.n_predict if config.tie_weights else [make() for _ in heads]

        first = nn.Linear(config.emb_dim, inner, bias=False)
        later = shared(lambda: nn.Linear(inner, inner, bias=False))[1:]
        width = config.emb_dim if config.project_vocabulary else inner
        self.emb = nn.ModuleList(shared(lambda: nn.Embedding(config.vocab_size, width)))
        self.proj = nn.ModuleList([first, *later])
        self.ln = nn.ModuleList(shared(lambda: _Norm(inner, is_affine=True)))
        num_foreseen = config.draft_vocab_size or config.vocab_size
        self.head = nn.ModuleList(shared(lambda: nn.Linear(width, num_foreseen, bias=False)))
        self.head_ids: Tensor | None
        self.register_buffer("head_ids", torch.arange(num_foreseen) if config.draft_vocab_size else None)
        self.emb_proj = nn.ModuleList(shared(lambda: nn.Linear(width, inner, bias=False)) if config.project_vocabulary else [])
        self.head_proj = nn.ModuleList(shared(lambda: nn.Linear(inner, width, bias=False)) if config.project_vocabulary else [])
        self._input_norm = _Norm(config.emb_dim, is_affine=False) if config.scale_input else None
        # What is left of a state after all heads is half of its variance, whatever their number; the tokens make up for the rest.
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self._token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5 / state_weight

    def begin(self, hidden: Tensor) -> Tensor:
        """The state that the first head reads: [R, emb_dim] -> the same."""
        return hidden if self._input_norm is None else self._input_norm(hidden) / 2**0.5

    def advance(self, index: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """The state of head `index`: [R, inner_dim].

        Args:
            index: 0..n_predict - 1.
            state: [R, emb_dim] from `begin` for the first head, else [R, inner_dim] of the head before.
            token_ids: [R] int64, the tokens before those that this head foresees.
        """
        token = self.emb[index](token_ids)
        if self.emb_proj:
            token = self.emb_proj[index](token)
        mixed = torch.add(self.proj[index](state), token, alpha=self._token_weight)
        return nn.functional.gelu(self.ln[index](mixed))

    def logits(self, index: int, state: Tensor) -> Tensor:
        """What head `index` foresees from its state: [R, vocab_size], -inf for ids that it has no row for."""
        found: Tensor = self.head[index](self.head_input(index, state))
        if self.head_ids is None:
            return found
        return found.new_full((len(found), self.config.vocab_size), -torch.inf).index_copy_(1, self.head_ids, found)

    def head_input(self, index: int, state: Tensor) -> Tensor:
        """What the layer that makes the logits reads: the state, or what stands in for the target's own hidden state."""
        read: Tensor = self.head_proj[index](state) if self.head_proj else state
        return read


def load_speculator(directory: Path, dtype: torch.dtype | None = None, vocabulary_of: VocabularyOf | None = None) -> MlpSpeculator:
    """Loads a speculator from a directory: `config.json` and safetensors files, tied or not.

    Args:
        directory: in the published form. Where its files have neither embedding nor head, those of the target take their place (our
            extension: `inner_dim` is the target's hidden size then, or `project_vocabulary` is set).
        dtype: of the weights; None: as stored.
        vocabulary_of: called with the configuration's `target` if the target's embedding and head are needed.

    Raises:
        UnsupportedModel: it cannot be read, or does not fit itself.
    """
    config = SpeculatorConfig.read(directory)
    stored = _read_tensors(directory)
    with torch.device("meta"):
        speculator = MlpSpeculator(config)
    own = {name for name, _ in chain(speculator.named_parameters(), speculator.named_buffers())}  # of parts that are shared, the first name only
    missing, unknown = sorted(own - stored.keys()), sorted(stored.keys() - set(speculator.state_dict()))
    if unknown:
        raise UnsupportedModel(f"{directory}: an MLP speculator has no tensor {unknown[0]}")
    lacking = [name for name in missing if not name.startswith(("emb.", "head."))]
    if lacking:
        raise UnsupportedModel(f"{directory}: tensor {lacking[0]} is missing")
    if "head_ids" in stored:
        _check_ids(stored["head_ids"], config, directory)
    shared: dict[str, Tensor] = {}
    if missing:
        if vocabulary_of is None:
            raise UnsupportedModel(f"{directory}: it has no {missing[0].partition('.')[0]} of its own, and the target's was not given")
        embedding, head = vocabulary_of(config.target)
        head = head[stored["head_ids"]] if "head_ids" in stored else head
        shared = {name: embedding if name.startswith("emb.") else head for name in missing}
    tensors = {name: stored[name] if name in stored else shared[name] for name in sorted(own)}
    wanted = speculator.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            whose = "" if name in stored else " of the target"
            raise UnsupportedModel(f"{directory}: {name}{whose} has the shape {list(tensor.shape)}, not {list(wanted[name].shape)}")
    number_type = dtype or stored["proj.0.weight"].dtype
    typed = {name: tensor.to(number_type) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    speculator.load_state_dict(typed, strict=False, assign=True)
    return speculator.requires_grad_(False)


def _check_ids(head_ids: Tensor, config: SpeculatorConfig, directory: Path) -> None:
    ids = set(head_ids.tolist())
    if head_ids.dtype != torch.int64 or len(ids) < head_ids.numel() or not ids <= set(range(config.vocab_size)):
        raise UnsupportedModel(f"{directory}: head_ids are to be ids among {config.vocab_size}, in int64 and none of them twice")


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{directory}: there are no safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except Exception as error:  # whatever foreign code raises
            raise UnsupportedModel(f"{file}: cannot be read: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
