"""The figures of a benchmark for a terminal. Values in, rich renderables out."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from client.bench.cell import Cell
from client.bench.ratio import BOOTSTRAP, COVERAGE, MIN_PAIRS
from client.bench.summary import ArmSummary, Spread, summarise

_NONE = "-"
_WORDS = {"load", "arm", "comparison", "ms"}


def tables(cells: Sequence[Cell]) -> RenderableType:
    """Throughput and comparison, latency, acceptance by position, and what has to be said with them."""
    summaries = [(cell, name, summarise(runs)) for cell in cells for name, runs in cell.runs.items()]
    return Group(_throughput(summaries), "", _latency(summaries), "", *_positions(summaries), _comparisons(cells), *_notes(cells, summaries))


def _throughput(summaries: Iterable[tuple[Cell, str, ArmSummary]]) -> Table:
    table = _table("load", "RTT", "arm", "req/s", "out/s", "all/s", "busy/s", "accept", "length", "errors")
    for cell, name, summary in summaries:
        table.add_row(
            *_title(cell),
            name,
            f"{summary.requests_per_s:.2f}",
            f"{summary.output_per_s:.2f}",
            f"{summary.total_per_s:.2f}",
            _figure(summary.steady_per_s, ".2f"),
            _figure(summary.drafts.acceptance_rate, ".3f"),
            _figure(summary.drafts.mean_accepted_length, ".2f"),
            ", ".join(f"{count} {reason}" for reason, count in summary.errors.items()) or "0",
            style="red" if summary.errors else None,
        )
    return table


def _latency(summaries: Iterable[tuple[Cell, str, ArmSummary]]) -> Table:
    table = _table("load", "RTT", "arm", "ms", "mean", "median", "p90", "p99", "of")
    for cell, name, summary in summaries:
        for what, spread in _spreads(summary):
            if spread is not None:
                table.add_row(*_title(cell), name, what, *(f"{value * 1e3:.1f}" for value in _values(spread)), str(spread.count))
    return table


def _spreads(summary: ArmSummary) -> list[tuple[str, Spread | None]]:
    return [("TTFT", summary.ttft), ("TPOT", summary.tpot), ("inter-token", summary.gap), ("end to end", summary.e2e)]


def _values(spread: Spread) -> tuple[float, float, float, float]:
    return spread.mean, spread.median, spread.p90, spread.p99


def _positions(summaries: Iterable[tuple[Cell, str, ArmSummary]]) -> list[RenderableType]:
    table = _table("load", "RTT", "arm", "accepted / drafted by position in the round")
    for cell, name, summary in summaries:
        if summary.drafts.drafted_at and summary.drafts.drafted:
            table.add_row(*_title(cell), name, " ".join(_figure(rate, ".2f") for rate in acceptance_by_position(summary)))
    return [table, ""] if table.row_count else []


def acceptance_by_position(summary: ArmSummary) -> list[float | None]:
    """Accepted / drafted at each position; None where nothing was drafted. Ends with the last position that was."""
    rates = [accepted / drafted if drafted else None for drafted, accepted in zip(summary.drafts.drafted_at, summary.drafts.accepted_at, strict=True)]
    while rates and rates[-1] is None:
        rates.pop()
    return rates


def _comparisons(cells: Iterable[Cell]) -> Table:
    table = _table("load", "RTT", "comparison", f"speedup {BOOTSTRAP}", "out/s", "1/TTFT", "same")
    for cell in cells:
        for each in cell.comparisons:
            speedup = each.speedup()
            table.add_row(
                *_title(cell),
                f"{each.arm} / {each.against}",
                Text(str(speedup) if speedup else _NONE, style="bold"),
                *(f"{each.ratios[merit].median:.3f}" if merit in each.ratios else _NONE for merit in ("output_per_s", "inverse_ttft")),
                f"{each.num_same}/{each.num_texts}",
            )
    return table


def _notes(cells: Sequence[Cell], summaries: Iterable[tuple[Cell, str, ArmSummary]]) -> list[RenderableType]:
    num_pairs = max((len(runs) for cell in cells for runs in cell.runs.values()), default=0)
    meaning = "out/s, all/s: output tokens and all tokens over the whole run; busy/s: output while all places were busy"
    notes = [f"{num_pairs} pairs; in brackets {COVERAGE}. {meaning}."]
    notes += [
        f"{each.arm} / {each.against}: {len(each.first_differences)} first differences in {each.num_compared_tokens} tokens."
        for cell in cells
        for each in cell.comparisons
        if each.first_differences
    ]
    if any(len(runs) < MIN_PAIRS for cell in cells for runs in cell.runs.values()):
        notes.append(f"Fewer than {MIN_PAIRS} pairs: look, but claim nothing.")
    lag_s = max((summary.send_lag_s for cell, _, summary in summaries if not cell.load.concurrency), default=0.0)
    if lag_s:
        notes.append(f"Latest request sent {lag_s * 1e3:.1f} ms after its time; latencies count from its time.")
    if any(summary.errors for _, _, summary in summaries):
        notes.append("Requests failed: they count in no latency, and the tokens that they brought count as output.")
    return [Text(note, style="dim" if index == 0 else "yellow") for index, note in enumerate(notes)]


def _title(cell: Cell) -> tuple[str, str]:
    return str(cell.load), _figure(cell.rtt_ms, "g")


def _figure(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=column != "errors")
    return table
