"""Small speculators for tests, as layers and as files."""

import json
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

from draft_service.mlp_speculator import MlpSpeculator, SpeculatorConfig
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_loader import LoadedModel
from shared.engine.model_runner import ModelRunner


def tiny_speculator(
    hidden_size: int = 64,
    vocab: int = 64,
    n_predict: int = 3,
    inner_dim: int = 32,
    tied: bool = False,
    scale_input: bool = True,
    project_vocabulary: bool = False,
    draft_vocab_size: int = 0,
) -> MlpSpeculator:
    """With random weights, in float64."""
    torch.manual_seed(0)
    config = SpeculatorConfig(n_predict, inner_dim, hidden_size, vocab, tied, scale_input, project_vocabulary, draft_vocab_size)
    speculator = MlpSpeculator(config).double().requires_grad_(False)
    for name, parameter in speculator.named_parameters():
        if name.startswith("ln"):
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return speculator


def trained_speculator(target: LoadedModel, num_texts: int = 96, num_steps: int = 150) -> MlpSpeculator:
    """A tiny target's, that has seen what it says after tokens drawn at random: right often enough to be worth listening to, and often wrong."""
    torch.manual_seed(0)
    length, runner = 24, ModelRunner(target, 6, 4)
    texts = torch.randint(0, target.vocab_size, (num_texts, length))
    hidden, said = [], []
    for text in texts.tolist():
        with head_input(target.model) as read:
            said.append(runner.forward([Span(text, 0, range(6), length)]).argmax(-1))
        hidden.append(read[0])
    states, labels = torch.stack(hidden).clone(), torch.stack(said).clone()
    speculator = tiny_speculator(target.hidden_size, target.vocab_size, n_predict=3, inner_dim=64).requires_grad_(True)
    optimizer = torch.optim.AdamW(speculator.parameters(), lr=1e-2)
    for _ in range(num_steps):
        state, losses = speculator.begin(states[:, :-4].flatten(0, 1)), []
        for index in range(3):
            state = speculator.advance(index, state, texts[:, 1 + index : length - 3 + index].flatten())
            losses.append(torch.nn.functional.cross_entropy(speculator.logits(index, state), labels[:, 1 + index : length - 3 + index].flatten()))
        optimizer.zero_grad()
        sum(losses, torch.zeros(())).backward()
        optimizer.step()
    return speculator.requires_grad_(False)


def save_speculator(speculator: MlpSpeculator, directory: Path, prefix: str = "speculator.", without: tuple[str, ...] = ()) -> Path:
    """In the published form."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: getattr(speculator.config, name) for name in SpeculatorConfig.__dataclass_fields__}
    (directory / "config.json").write_text(json.dumps({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", **config}))
    stored = chain(speculator.named_parameters(), speculator.named_buffers())  # of what is shared, the first name only
    tensors = {f"{prefix}{name}": tensor.clone() for name, tensor in stored if not name.startswith(without or "-")}
    save_file(tensors, directory / "model.safetensors")
    return directory
