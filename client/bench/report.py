"""The figures of a benchmark as one JSON file, and out of it again for nobody but people and plots. It computes nothing new."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from client.bench.cell import Cell
from client.bench.environment import environment
from client.bench.measure import Run
from client.bench.ratio import COVERAGE
from client.bench.summary import Spread, summarise


def to_record(cells: Sequence[Cell], command: str, settings: Mapping[str, object], with_texts: bool) -> dict[str, Any]:
    """All of a benchmark as plain values.

    Args:
        cells: what was measured.
        command: that led to it.
        settings: in use, defaults included.
        with_texts: keep the tokens of every request, and of its prompt.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "settings": dict(settings),
        "environment": environment(),
        "intervals": f"low and high of a ratio: {COVERAGE}",
        "cells": [_cell(cell, with_texts) for cell in cells],
    }


def _cell(cell: Cell, with_texts: bool) -> dict[str, Any]:
    return {
        "load": asdict(cell.load),
        "rtt_ms": cell.rtt_ms,
        "arms": {
            name: {"summary": _with_rates(asdict(summarise(runs))), "runs": [_run(run, with_texts) for run in runs]}
            for name, runs in cell.runs.items()
        },
        "comparisons": [asdict(comparison) for comparison in cell.comparisons],
    }


def _run(run: Run, with_texts: bool) -> dict[str, Any]:
    record = _with_rates(asdict(run))
    gap = Spread.of(run.gap_s)
    record["gap_s"] = asdict(gap) if gap else None  # one for each token, more or less: the raw values would be most of the file
    if not with_texts:
        del record["texts"], record["prompt_ids"]
    return record


def _with_rates(record: dict[str, Any]) -> dict[str, Any]:
    """Adds what follows from the counters."""
    drafts = record["drafts"]
    drafts["acceptance_rate"] = drafts["accepted"] / drafts["drafted"] if drafts["drafted"] else None
    drafts["mean_accepted_length"] = 1 + drafts["accepted"] / drafts["rounds"] if drafts["rounds"] else None
    return record
