"""Records texts of the default target, and how often each proposer is right along them.

    python -m bench.acceptance texts       writes texts.json: answers of the target, at temperature 0 and 1
    python -m bench.acceptance measure     writes recorded.json: acceptance along those texts, which a test compares with

Each round starts from the recorded text, in coupled mode and float32, so the figures depend on proposer and text alone.
"""

import argparse
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.acceptance.measure import Tally, measure
from bench.acceptance.proposers import NUM_GUESSES, PROPOSERS, proposer, rows, target
from bench.acceptance.texts import RecordedText, load_texts, record, save_texts
from shared.default_model import DEFAULT_TARGET, resolve
from shared.tokenizer import load_tokenizer

_HERE = Path(__file__).parent
TEXTS, RECORDED = _HERE / "texts.json", _HERE / "recorded.json"
TEMPERATURES = (0.0, 1.0)
_MAX_TOKENS = 192
_TEXTS_OF_CONTROL = 20  # of each temperature: it guesses in every round, and a guess takes it a pass of the target


@dataclass(frozen=True, slots=True)
class Figures:
    """What is kept of a measurement; see `Tally`."""

    rate: float
    mean_length: float
    by_position: tuple[float, ...]
    drafted: int
    rounds: int
    silent_rounds: int

    @classmethod
    def of(cls, tally: Tally) -> "Figures":
        """Rounded to what means something."""
        by_position = tuple(round(share, 4) for share in tally.by_position)
        return cls(round(tally.rate, 4), round(tally.mean_length, 4), by_position, tally.drafted.total(), tally.rounds, tally.silent_rounds)


def load_recorded() -> dict[tuple[str, float], Figures]:
    """The figures of recorded.json, by proposer and temperature."""
    cells: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
    return {(cell.pop("proposer"), cell.pop("temperature")): Figures(**{**cell, "by_position": tuple(cell["by_position"])}) for cell in cells}


def along(name: str, temperature: float, batch: int) -> Figures:
    """Measures a proposer along the texts of one temperature."""
    texts = texts_of(temperature)
    if name == "target":
        texts = texts[:_TEXTS_OF_CONTROL]
    read = rows_of(temperature) if name == "speculator" else [None] * len(texts)
    return Figures.of(measure(proposer(name), texts, read, NUM_GUESSES, batch, load_tokenizer(resolve(DEFAULT_TARGET)).vocab_size))


@cache
def texts_of(temperature: float) -> list[RecordedText]:
    """The texts of one temperature."""
    return [text for text in load_texts(TEXTS) if text.temperature == temperature]


@cache
def rows_of(temperature: float) -> list[Tensor]:
    """What the target's head reads along each of them."""
    return rows(texts_of(temperature))


def _write_texts() -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_TARGET))
    lines = (_HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer.render_chat([{"role": "user", "content": line}]) for line in lines]
    pool = target()
    texts = [
        text for temperature in TEMPERATURES for text in record(pool.runner, pool.allocator, prompts, temperature, _MAX_TOKENS, tokenizer.vocab_size)
    ]
    save_texts(texts, TEXTS)


def _measure(console: Console) -> None:
    table = Table("proposer", "T", "acceptance", "tokens a round", "by position", "drafted", "silent rounds", box=None)
    cells = []
    for name in PROPOSERS:
        for temperature in TEMPERATURES:
            figures = along(name, temperature, batch=8)
            cells.append({"proposer": name, "temperature": temperature} | {key: getattr(figures, key) for key in Figures.__slots__})
            shares = " ".join(f"{share:.3f}" for share in figures.by_position)
            silent = f"{figures.silent_rounds / (figures.rounds + figures.silent_rounds):.0%}"
            table.add_row(name, f"{temperature:g}", f"{figures.rate:.3f}", f"{figures.mean_length:.2f}", shares, f"{figures.drafted:,}", silent)
    said = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m bench.acceptance measure",
        "target": DEFAULT_TARGET,
        "num_guesses": NUM_GUESSES,
        "cells": cells,
    }
    RECORDED.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    console.print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "measure"))
    if parser.parse_args().what == "texts":
        _write_texts()
    else:
        _measure(Console())


if __name__ == "__main__":
    main()
