"""Breaks one rule of the code at a time, in a copy of the tree, and sees the named tests fail. It does not know why a rule matters.

A test notices a mutant if it passes on the unchanged copy and fails on the changed one by an assertion: an error of import or collection, a
timeout or any other exception does not count. The mutants are in `tools/mutants.toml`, their table is `docs/mutants.md`.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
PAGE = ROOT / "docs" / "mutants.md"
_PRODUCT = ("client", "draft_service", "verifier_service", "shared")
_COPIED = (*_PRODUCT, "protos", "tests", "tools", "pyproject.toml", "README.md")
_TIMEOUT_S = 120  # of one test
_LOG_TAIL = 4000  # characters shown of what pytest printed
# Loaded once, in the process that the others are forked from: most of the time of a short test otherwise. Nothing of the product is.
_PRELOADED = ["torch", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "gemma2", "gemma3"))]
_OPTIONS = (
    *("-q", "--tb=short", "--hypothesis-profile=mutants"),
    *("-p", "no:cacheprovider"),
    *("-o", f"timeout={_TIMEOUT_S}"),
    *("-W", "ignore:Module already imported"),  # a plugin that what is loaded once has loaded too
)


class DoesNotApply(Exception):
    """The text that a mutant replaces is not in its file exactly once."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken rule.

    Args:
        name: what the tool calls it.
        breaks: the rule, as the table tells it.
        path: the file that changes.
        old: what stands there, exactly once.
        new: what stands there instead.
        tests: each of them has to fail, in one of its cases at least.
    """

    name: str
    breaks: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the named tests ended.

    Args:
        ways: per test, how its cases did: `passed`, `skipped`, `assertion`, or the name of another error.
        seconds: time of the run.
        log: what pytest printed.
    """

    ways: dict[str, set[str]]
    seconds: float
    log: str

    @property
    def all_passed(self) -> bool:
        """Whether every test ran and passed."""
        return all("passed" in ways and ways <= {"passed", "skipped"} for ways in self.ways.values())

    @property
    def all_noticed(self) -> bool:
        """Whether every test failed, by assertions alone."""
        return all("assertion" in ways and ways <= {"assertion", "passed", "skipped"} for ways in self.ways.values())


class _Recorder:
    """A plugin of pytest: notes how each test ends, its parametrised cases together."""

    def __init__(self, tests: Iterable[str]) -> None:
        self.ways: dict[str, set[str]] = {test: set() for test in tests}

    @pytest.hookimpl(tryfirst=True)  # the first answer ends this hook, and ours is none
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """A phase of a test is over."""
        ways = self.ways[item.nodeid.partition("[")[0]]
        if call.excinfo is not None:
            ways.add(_way_of(call.excinfo.value, call.when))
        elif call.when == "call":
            ways.add("passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file has been read."""
        if report.failed:
            for ways in self.ways.values():
                ways.add("collection error")


def _way_of(error: BaseException, phase: str) -> str:
    if isinstance(error, pytest.skip.Exception):
        return "skipped"
    if isinstance(error, BaseExceptionGroup):  # hypothesis has found several failures
        ways = {_way_of(each, phase) for each in error.exceptions}
        return "assertion" if ways == {"assertion"} else " and ".join(sorted(ways))
    return "assertion" if isinstance(error, AssertionError) and phase == "call" else type(error).__name__


def read_list() -> tuple[Mutant, ...]:
    """All mutants, in the order of the list."""
    return tuple(Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in tomllib.loads(LIST.read_text())["mutant"])


def changed(mutant: Mutant, root: Path) -> str:
    """Text of the mutant's file below `root` with the mutant in it.

    Raises:
        DoesNotApply: the old text is not there exactly once.
    """
    text = (root / mutant.path).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise DoesNotApply(f"{mutant.name}: its text is {count} times in {mutant.path}")
    return text.replace(mutant.old, mutant.new)


def table(mutants: Iterable[Mutant]) -> str:
    """The mutants as a table in Markdown."""
    lines = ["| mutant | the rule that it breaks | where | fails |", "|---|---|---|---|"]
    lines += [f"| `{each.name}` | {each.breaks} | `{each.path}` | {'<br>'.join(f'`{test}`' for test in each.tests)} |" for each in mutants]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def copy_of_tree() -> Iterator[Path]:
    """A copy of all that the tests need, for as long as the context lives."""
    with tempfile.TemporaryDirectory(prefix="outrider-mutant-") as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        yield copy


def run(tests: tuple[str, ...], mutant: Mutant | None) -> Outcome:
    """Runs tests in a copy of the tree. For a process of its own: the modules that it loads are the copy's."""
    with copy_of_tree() as copy:
        if mutant is not None:
            (copy / mutant.path).write_text(changed(mutant, copy))
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "protos")]
        os.environ["PYTHONPATH"] = f"{copy}{os.pathsep}{copy / 'protos'}"  # of processes that a test starts
        sys.dont_write_bytecode = True
        recorder, log, started = _Recorder(tests), io.StringIO(), time.monotonic()
        options = [*_OPTIONS, f"--rootdir={copy}"]
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            pytest.main([*options, *tests], plugins=[recorder])
        foreign = [name for name in _PRODUCT if name in sys.modules and not str(sys.modules[name].__file__).startswith(str(copy))]
        if foreign:
            raise RuntimeError(f"these did not come from the copy: {', '.join(foreign)}")
        os.chdir(ROOT)
        return Outcome(recorder.ways, time.monotonic() - started, log.getvalue())


def _run_all(jobs: dict[str, tuple[tuple[str, ...], Mutant | None]], num_processes: int) -> Iterator[tuple[str, Outcome]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(num_processes, context, max_tasks_per_child=1) as pool:  # every run begins without a module of the product
        futures = {pool.submit(run, *job): name for name, job in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _baseline(mutants: Iterable[Mutant], num_processes: int) -> bool:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.partition("::")[0] for test in tests})
    jobs: dict[str, tuple[tuple[str, ...], Mutant | None]] = {
        file: (tuple(test for test in tests if test.partition("::")[0] == file), None) for file in files
    }
    print(f"{len(tests)} tests on the unchanged tree", flush=True)
    broken = [outcome for _, outcome in _run_all(jobs, num_processes) if not outcome.all_passed]
    for outcome in broken:
        print(outcome.log[-_LOG_TAIL:], _told(outcome), sep="\n")
    return not broken


def _told(outcome: Outcome) -> str:
    return "\n".join(f"    {test}: {', '.join(sorted(ways)) or 'not found'}" for test, ways in outcome.ways.items())


def main() -> None:
    """Run all mutants, or those that are named; exits with 1 if one is not noticed, with 2 if one does not apply or a test fails without any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all of them if none is named")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--write-table", action="store_true", help=f"only write the table in {PAGE.name} anew")
    arguments = parser.parse_args()
    mutants = read_list()
    if arguments.write_table:
        head, _, _ = PAGE.read_text().partition("| mutant |")
        PAGE.write_text(head + table(mutants))
        return
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = {mutant.name: mutant for mutant in mutants if mutant.name in arguments.names or not arguments.names}
    for mutant in chosen.values():
        try:
            changed(mutant, ROOT)
        except DoesNotApply as error:
            parser.error(f"{error}; the code has changed, and {LIST.name} has to follow")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    if not _baseline(chosen.values(), arguments.jobs):
        sys.exit(2)
    survivors = []
    for name, outcome in _run_all({name: (mutant.tests, mutant) for name, mutant in chosen.items()}, arguments.jobs):
        print(f"{'noticed ' if outcome.all_noticed else 'SURVIVED'} {name} ({outcome.seconds:.1f} s)", flush=True)
        if not outcome.all_noticed:
            survivors.append(name)
            print(_told(outcome), outcome.log[-_LOG_TAIL:], sep="\n")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    if survivors:
        sys.exit(f"not noticed: {', '.join(sorted(survivors))}")


if __name__ == "__main__":
    main()
