"""Generates the stubs beside the protos, or tells where they differ. It knows the compiler's flags and no message."""

import argparse
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(sources: Path, out: Path) -> None:
    """Compile every .proto below `sources` into `out`, at the same relative place.

    Raises:
        SystemExit: the compiler found an error; it has said which.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    includes = resources.files("grpc_tools") / "_proto"  # google/protobuf/*.proto
    arguments = [
        "protoc",
        f"--proto_path={sources}",
        f"--proto_path={includes}",
        # By path: the plugins need not be on PATH for `make` to work without an activated environment.
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *sorted(str(path.relative_to(sources)) for path in sources.rglob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def drift(sources: Path, checked_in: Path) -> list[str]:
    """Paths, relative to `checked_in`, of stubs that are missing there, left over, or other than the compiler's output."""
    with tempfile.TemporaryDirectory() as fresh:
        generate(sources, Path(fresh))
        wanted, found = _stubs(Path(fresh)), _stubs(checked_in)
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def _stubs(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for pattern in STUBS for path in root.rglob(pattern)}


def main() -> None:
    """Regenerate in place; with `--check` change nothing and fail on drift."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a stub differs")
    if not parser.parse_args().check:
        for pattern in STUBS:
            for stale in PROTOS.rglob(pattern):
                stale.unlink()
        generate(PROTOS, PROTOS)
        return
    if differing := drift(PROTOS, PROTOS):
        print("These stubs are not what the protos give; run `make protos`:", *differing, sep="\n  ", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
