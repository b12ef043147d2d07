"""Configuration: flags over variables over defaults, every mistake told at once, and help that comes from the same fields."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from client.pair import ALL_VARIABLES
from draft_service.config import DraftConfig
from shared.address import dial_address, is_loopback, join_address, split_address
from shared.config import ConfigError, ServiceConfig, load, settings, variables
from tools import gen_configuration
from verifier_service.config import VerifierConfig

SCHEMAS = (VerifierConfig, DraftConfig)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def problems_of(schema: type[ServiceConfig], *arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(schema, arguments, ALL_VARIABLES)
    return caught.value.problems


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_BLOCK_SIZE", "32")
    monkeypatch.setenv("OUTRIDER_MAX_QUEUE", "7")
    config = load(VerifierConfig, ["--block-size", "64"])
    assert (config.block_size, config.max_queue, config.max_draft_tokens) == (64, 7, 16)


def test_a_flag_takes_its_value_with_or_without_an_equals_sign_and_the_last_one_counts() -> None:
    assert load(VerifierConfig, ["--kv-blocks=5", "--target", "a=b", "--kv-blocks", "6"]).kv_blocks == 6
    assert load(VerifierConfig, ["--target", "a=b"]).target == "a=b"
    assert load(VerifierConfig, ["--metrics="]).metrics == ""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_setting_is_both_a_flag_and_a_variable(schema: type[ServiceConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = schema()
    for row in settings(schema):
        text = str(getattr(plain, row.name))
        if row.name == "link_token_file":
            continue
        assert getattr(load(schema, [f"{row.flag}={text}"]), row.name) == getattr(plain, row.name)
        with monkeypatch.context() as patch:
            patch.setenv(row.variable, text)
            assert getattr(load(schema, []), row.name) == getattr(plain, row.name)


def test_every_mistake_is_told_at_once_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KV_BLOCKS", "many")
    monkeypatch.setenv("OUTRIDER_WINDO", "3")
    told = problems_of(VerifierConfig, "--block-sise", "3", "--block-size=0", "stray", "--scorer", "fast", "--listen", "::1:3", "--max-queue")
    assert set(told) == {
        "unknown flag --block-sise; did you mean --block-size?",
        "unexpected argument 'stray'",
        "--max-queue needs a value",
        "unknown variable OUTRIDER_WINDO; did you mean OUTRIDER_WINDOW?",
        "OUTRIDER_KV_BLOCKS must be a whole number from 0 to 100000000; it is 'many'",
        "--block-size must be a whole number from 1 to 256; it is '0'",
        "--scorer must be auto, expanded or multi_query; it is 'fast'",
        "--listen: an IPv6 host is written in brackets, as in [::1]:50051",
    }


def test_a_variable_of_the_other_service_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NGRAM_MAX", "5")
    monkeypatch.setenv("OUTRIDER_ADDRESS", "x:1")
    assert load(VerifierConfig, [], ALL_VARIABLES).block_size == 16


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", ""])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    assert problems_of(VerifierConfig, f"--drain-grace-s={text}") == (f"--drain-grace-s must be a number from 0 to 3600; it is {text!r}",)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:1 "])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    assert problems_of(VerifierConfig, "--device", device) == (f"--device must be auto, cpu, cuda or cuda:N; it is {device!r}",)


def test_a_link_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    told = problems_of(VerifierConfig, "--link", "0.0.0.0:50052", "--block-size", "0")
    assert any("reachable from other machines" in problem for problem in told)
    assert len(told) == 2
    token = tmp_path / "token"
    token.write_text("secret")
    config = load(VerifierConfig, ["--link", "0.0.0.0:50052", "--link-token-file", str(token)])
    assert config.link_token_file == token


def test_a_token_file_that_does_not_exist_is_refused() -> None:
    assert problems_of(DraftConfig, "--link-token-file", "/nowhere/token") == ("--link-token-file: there is no file '/nowhere/token'",)


def test_the_proposer_follows_from_the_draft_model() -> None:
    assert load(DraftConfig, []).proposer == "ngram"
    assert load(DraftConfig, ["--draft", "some/model"]).proposer == "model"


def test_an_empty_ngram_range_is_refused() -> None:
    assert problems_of(DraftConfig, "--ngram-min", "3", "--ngram-max", "2") == (
        "--ngram-max: must not be below ngram-min; it is 2, and ngram-min is 3",
    )


def test_each_draft_service_has_an_id_of_its_own() -> None:
    assert DraftConfig().instance_id != DraftConfig().instance_id


def test_a_configuration_does_not_change() -> None:
    config = VerifierConfig()
    with pytest.raises(ValidationError):
        config.block_size = 1


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_setting_says_what_it_is_what_it_takes_and_what_it_defaults_to(schema: type[ServiceConfig]) -> None:
    for row in settings(schema):
        assert row.description.endswith("."), row.name
        assert row.accepts, row.name
        assert row.default, row.name


@pytest.mark.parametrize("schema", SCHEMAS)
def test_settings_of_a_group_stand_together(schema: type[ServiceConfig]) -> None:
    groups = [row.group for row in settings(schema)]
    assert len(set(groups)) == 1 + sum(one != other for one, other in itertools.pairwise(groups))


def test_what_both_services_share_has_one_name_in_both() -> None:
    assert variables(ServiceConfig) <= variables(VerifierConfig) & variables(DraftConfig)


def test_the_documentation_is_up_to_date() -> None:
    assert gen_configuration.PATH.read_text() == gen_configuration.make_text()


def test_reading_a_configuration_needs_no_torch() -> None:
    probe = "import sys, verifier_service.config, draft_service.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.parametrize(("address", "host", "port"), [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:65535", "::1", 65535), ("a.b:1", "a.b", 1)])
def test_an_address_is_split_and_joined(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "::1:50051", "a b:1", "host:٣"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|port must|brackets"):
        split_address(address)


def test_only_loopback_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"]))
    assert not any(map(is_loopback, ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.example.org:1"]))


def test_a_wildcard_address_is_dialled_on_loopback() -> None:
    assert [dial_address(each) for each in ("0.0.0.0:5", "[::]:5", "10.0.0.1:5")] == ["127.0.0.1:5", "[::1]:5", "10.0.0.1:5"]
