"""Breaks one rule of the code at a time, in a copy of the tree, and sees the named tests fail. It does not know why a rule matters.

A test kills a mutant if it passes on the unchanged copy and fails on the changed one by an assertion of its own: an error of import or
collection, a timeout or any other exception does not count. The mutants are in `tools/mutant_list.py`, their table in `docs/mutants.md`.
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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
_PRODUCT = ("client", "draft_service", "verifier_service", "shared")
_COPIED = (*_PRODUCT, "protos", "tests", "tools", "pyproject.toml", "README.md")
_TIMEOUT_S = 120  # of one test
# Imported once, in the process that all others are forked from: half of the time of a short test otherwise. Nothing of the product.
_PRELOADED = ["torch", "transformers.masking_utils", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "gemma3"))]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each named test, with or without a mutant.

    Args:
        results: per named test the ways in which its cases ended: `passed`, `assertion`, or the name of another error.
        seconds: time of the run.
        log: what pytest printed.
    """

    results: dict[str, set[str]]
    seconds: float
    log: str

    @property
    def passed(self) -> bool:
        """Whether all named tests ran and passed."""
        return all(ways <= {"passed", "skipped"} and "passed" in ways for ways in self.results.values())

    @property
    def killed(self) -> bool:
        """Whether all named tests failed, and by nothing but assertions."""
        return all(ways <= {"passed", "skipped", "assertion"} and "assertion" in ways for ways in self.results.values())


class _Recorder:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.results: dict[str, set[str]] = {test: set() for test in tests}

    def pytest_exception_interact(self, node: object, call: object) -> None:
        """A test, a fixture or a collection failed."""
        error = call.excinfo.value  # type: ignore[attr-defined]  # pytest is imported in the children alone
        way = "assertion" if _is_assertion(error) and call.when == "call" else type(error).__name__  # type: ignore[attr-defined]
        self._note(node.nodeid, way)  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: object) -> None:
        """A phase of a test is over."""
