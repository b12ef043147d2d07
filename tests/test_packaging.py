import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from draft_service.speculator_loader import DEFAULT_SPECULATOR
from tools.gen_protos import PROTOS, drift

ROOT = PROTOS.parent
PACKAGES = ("client", "draft_service", "verifier_service", "shared", "outrider")


def test_checked_in_stubs_are_what_the_protos_give() -> None:
    assert drift(PROTOS, PROTOS) == []


def test_a_changed_proto_and_a_left_over_stub_are_noticed(tmp_path: Path) -> None:
    protos = tmp_path / "protos"
    shutil.copytree(PROTOS, protos)
    info = protos / "outrider" / "v1" / "info.proto"
    info.write_text(info.read_text() + "\n// A message that has no stub yet.\nmessage Unheard {}\n")
    (protos / "outrider" / "v1" / "gone_pb2.py").write_text("")
    assert drift(protos, protos) == ["outrider/v1/gone_pb2.py", "outrider/v1/info_pb2.py", "outrider/v1/info_pb2.pyi"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, ROOT)
    (built,) = out.glob("outrider-*.whl")
    return built


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-index", "--disable-pip-version-check"], check=True)


def test_the_wheel_holds_every_package_its_types_and_the_protos_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*") if path.suffix in {".proto", ".py", ".pyi"}} <= names
    assert {f"draft_service/speculators/{DEFAULT_SPECULATOR}/{name}" for name in ("config.json", "model.safetensors", "README.md")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_speculator_that_is_shipped_is_small() -> None:
    files = (ROOT / "draft_service" / "speculators").rglob("*")
    assert 1_000_000 < sum(file.stat().st_size for file in files if file.is_file()) < 20_000_000


def test_the_installed_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, wheel)
    modules = ("client", "draft_service", "verifier_service", "shared.default_model", "outrider.v1.link_pb2_grpc", "outrider.v1.generate_pb2")
    program = f"import sys; sys.path.insert(0, {str(site)!r})\n" + "".join(f"import {name}; print({name}.__file__)\n" for name in modules)
    printed = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert len(printed) == len(modules)
    assert all(Path(line).is_relative_to(site) for line in printed)


@pytest.mark.parametrize("statement", ["import protos", "import protos.outrider.v1.link_pb2", "from protos.outrider.v1 import link_pb2"])
def test_stubs_cannot_be_imported_under_a_second_name(statement: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--stdin-filename", "client/example.py", "-"]
    outcome = subprocess.run(command, input=f"{statement}\n", check=False, capture_output=True, text=True, cwd=ROOT)
    assert outcome.returncode == 1
    assert "import `outrider.v1`" in outcome.stdout


def test_every_direct_dependency_is_pinned_and_no_pin_is_of_one_machine() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    pinned = {canonical(line.partition("==")[0]) for line in pins}
    assert {canonical(re.split(r"[<>=!~;\[ ]", requirement)[0]) for requirement in requirements} - pinned == set()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
