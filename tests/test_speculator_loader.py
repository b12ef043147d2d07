"""From a name to a proposer: what comes with the package, what a directory may lack, and what is said of one that cannot be used."""

import json

import pytest

from draft_service.speculator_loader import DEFAULT_SPECULATOR, load_proposer
from shared.errors import UnsupportedModel
from tests.support.tiny_speculators import save_speculator, tiny_speculator


def load(directory, target="", device="cpu"):
    return load_proposer(str(directory), target, "auto", device, 1, "native")


def test_what_the_configuration_says_of_its_origin_is_told(tmp_path):
    save_speculator(tiny_speculator(), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({name: said[name] for name in ("n_predict", "inner_dim", "emb_dim", "vocab_size", "scale_input")})
    )
    assert load(tmp_path)[1] == "", "published files do not say"
    (tmp_path / "config.json").write_text(json.dumps(said | {"tokenizer_fingerprint": "ab12"}))
    proposer, fingerprint = load(tmp_path)
    assert (proposer.name, proposer.kinds, fingerprint) == (str(tmp_path), ("speculator",), "ab12")


def test_without_a_vocabulary_and_a_target_it_says_what_is_missing(tmp_path):
    save_speculator(tiny_speculator(tied=True, inner_dim=64), tmp_path, without=("emb", "head"))
    with pytest.raises(UnsupportedModel, match="names no target; --speculator-target does"):
        load(tmp_path)
    with pytest.raises(UnsupportedModel, match="its embedding and head cannot be read"):
        load(tmp_path, str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '"words"'])
def test_a_configuration_that_is_none_is_told_as_such(tmp_path, text):
    save_speculator(tiny_speculator(), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="not the configuration of an MLP speculator"):
        load(tmp_path)


def test_a_name_that_is_nowhere_is_told():
    with pytest.raises(UnsupportedModel, match="neither a directory nor a speculator of the hub"):
        load("there-is/no-such-speculator")


def test_a_device_that_is_not_there_is_told(tmp_path):
    save_speculator(tiny_speculator(), tmp_path)
    with pytest.raises(UnsupportedModel, match="'cuda:99' is not there"):
        load(tmp_path, device="cuda:99")


@pytest.mark.real_model
def test_the_one_that_comes_with_the_package_loads_by_its_name():
    proposer, fingerprint = load(DEFAULT_SPECULATOR)
    assert (proposer.name, len(fingerprint)) == (DEFAULT_SPECULATOR, 64)
