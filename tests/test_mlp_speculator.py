"""The speculator's layers against the published formula, and what its files may hold."""

import json
import math

import pytest
import torch

from draft_service.mlp_speculator import SpeculatorConfig, load_speculator
from shared.errors import UnsupportedModel
from tests.support.tiny_speculators import save_speculator, tiny_speculator


def by_the_paper(tensors: dict[str, torch.Tensor], config: SpeculatorConfig, hidden: torch.Tensor, token_ids: list[int]) -> list[torch.Tensor]:
    """Logits of every head for one row, written out from the published description, tensor by tensor."""

    def part(name: str, index: int) -> torch.Tensor:
        if not config.tie_weights:
            return tensors[name.format(index)]
        return tensors[name.format(min(index, 1) if name.startswith("proj") else 0)]

    state_weight = 0.5 ** (0.5 / config.n_predict)
    token_weight = math.sqrt((1 - state_weight**2) * config.inner_dim / 2)
    state = hidden
    if config.scale_input:
        state = state / torch.sqrt((state**2).mean() + 1e-6) / math.sqrt(2)
    logits = []
    for index, token_id in enumerate(token_ids):
        mixed = part("proj.{}.weight", index) @ state + part("emb.{}.weight", index)[token_id] * token_weight / state_weight
        normed = mixed / torch.sqrt((mixed**2).mean() + 1e-6) * part("ln.{}.weight", index) + part("ln.{}.bias", index)
        state = normed * 0.5 * (1 + torch.erf(normed / math.sqrt(2)))
        logits.append(part("head.{}.weight", index) @ state)
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_the_layers_say_what_the_paper_says(tied, scale_input):
    speculator = tiny_speculator(hidden_size=48, vocab=50, inner_dim=32, tied=tied, scale_input=scale_input)
    hidden = 3 * torch.randn(2, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token_ids = [[7, 8, 49], [0, 1, 2]]
    expected = [by_the_paper(dict(speculator.named_parameters()), speculator.config, row, ids) for row, ids in zip(hidden, token_ids, strict=True)]
    state = speculator.begin(hidden)
    for index in range(3):
        state = speculator.advance(index, state, torch.tensor([ids[index] for ids in token_ids]))
        torch.testing.assert_close(speculator.logits(index, state), torch.stack([row[index] for row in expected]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_projections_stand_between_the_state_and_the_vocabulary(tied):
    """The same as layers whose embedding and head have been multiplied out."""
    projecting = tiny_speculator(hidden_size=48, vocab=50, tied=tied, project_vocabulary=True)
    plain = tiny_speculator(hidden_size=48, vocab=50, tied=tied)
    for index in range(3):
        for name in ("proj", "ln"):
            getattr(plain, name)[index].load_state_dict(getattr(projecting, name)[index].state_dict())
        plain.emb[index].weight.copy_(projecting.emb[index].weight @ projecting.emb_proj[index].weight.T)
        plain.head[index].weight.copy_(projecting.head[index].weight @ projecting.head_proj[index].weight)
    states = [speculator.begin(torch.ones(1, 48, dtype=torch.float64)) for speculator in (projecting, plain)]
    for index in range(3):
        states = [speculator.advance(index, state, torch.tensor([7 + index])) for speculator, state in zip((projecting, plain), states, strict=True)]
        found, expected = (speculator.logits(index, state) for speculator, state in zip((projecting, plain), states, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prefix", ["speculator.", ""])
@pytest.mark.parametrize("tied", [False, True])
def test_published_files_are_read(tmp_path, tied, prefix):
    speculator = tiny_speculator(tied=tied)
    loaded = load_speculator(save_speculator(speculator, tmp_path, prefix))
    assert loaded.config == speculator.config
    expected = dict(speculator.named_parameters())
    assert {name: torch.equal(tensor, expected[name]) for name, tensor in loaded.named_parameters()} == dict.fromkeys(expected, True)


def test_a_tied_file_may_hold_every_name(tmp_path):
    """Some writers store a shared tensor once for each of its names."""
    from safetensors.torch import save_file

    speculator = tiny_speculator(tied=True)
    save_speculator(speculator, tmp_path)
    save_file({f"speculator.{name}": tensor.clone() for name, tensor in speculator.state_dict().items()}, tmp_path / "model.safetensors")
    assert torch.equal(load_speculator(tmp_path).head[2].weight, speculator.head[0].weight)


def test_embedding_and_head_may_be_the_targets(tmp_path):
    speculator = tiny_speculator(tied=True, inner_dim=64)
    save_speculator(speculator, tmp_path, without=("emb", "head"))
    embedding, head = torch.randn(64, 64), torch.randn(64, 64)
    loaded = load_speculator(tmp_path, None, lambda target: (embedding, head))
    assert torch.equal(loaded.emb[1].weight, embedding.double())
    assert torch.equal(loaded.head[2].weight, head.double())
    with pytest.raises(UnsupportedModel, match="the target's was not given"):
        load_speculator(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"emb.0.weight of the target has the shape \[64, 63\]"):
        load_speculator(tmp_path, None, lambda target: (embedding[:, 1:], head))


def test_a_head_may_know_some_ids_only(tmp_path):
    whole = tiny_speculator(tied=True, project_vocabulary=True)
    some = tiny_speculator(tied=True, project_vocabulary=True, draft_vocab_size=3)
    some.load_state_dict({name: each for name, each in whole.state_dict().items() if not name.startswith("head.")}, strict=False)
    some.head_ids.copy_(torch.tensor([60, 4, 9]))
    save_speculator(some, tmp_path, without=("emb.", "head."))
    loaded = load_speculator(tmp_path, None, lambda target: (whole.emb[0].weight, whole.head[0].weight))
    states = [each.advance(0, each.begin(torch.ones(2, 64, dtype=torch.float64)), torch.tensor([5, 6])) for each in (whole, loaded)]
    expected, found = whole.logits(0, states[0]), loaded.logits(0, states[1])
    assert found.shape == expected.shape
    torch.testing.assert_close(found[:, [4, 9, 60]], expected[:, [4, 9, 60]])
    assert int(found.isfinite().sum()) == 2 * 3


@pytest.mark.parametrize("ids", [[4, 4, 9], [-1, 4, 9], [4, 9, 64]])
def test_ids_that_are_none_are_refused(tmp_path, ids):
    speculator = tiny_speculator(draft_vocab_size=3)
    speculator.head_ids.copy_(torch.tensor(ids))
    with pytest.raises(UnsupportedModel, match="none of them twice"):
        load_speculator(save_speculator(speculator, tmp_path))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"n_predict": 0}, "1 to 64 heads"),
        ({"n_predict": 65}, "1 to 64 heads"),
        ({"vocab_size": "many"}, "not the configuration"),
        ({"inner_dim": None}, "not the configuration"),
        ({"inner_dim": 16}, r"has the shape \[\d+, \d+\], not \[\d+, \d+\]"),
        ({"n_predict": 4}, "is missing"),
        ({"draft_vocab_size": 7}, "head_ids is missing"),
        ({"draft_vocab_size": 65}, "cannot foresee 65 of 64"),
        ({"n_predict": 2}, "has no tensor"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, config, what):
    save_speculator(tiny_speculator(), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | config))
    with pytest.raises(UnsupportedModel, match=what):
        load_speculator(tmp_path)


def test_a_directory_without_files_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="not the configuration"):
        load_speculator(tmp_path)
    save_speculator(tiny_speculator(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load_speculator(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="no safetensors files"):
        load_speculator(tmp_path)
