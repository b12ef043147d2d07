"""The figures of a benchmark as pictures. It needs matplotlib, which comes with the extra `bench`."""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from client.bench.cell import PLAIN, Cell
from client.bench.summary import ArmSummary, summarise
from client.bench.table import acceptance_by_position
from shared.errors import OutriderError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

K_ARM = "k="
_SIZE = (6.4, 4.2)
_DPI = 120

Points = dict[str, list[tuple[float, float]]]


def require_matplotlib() -> None:
    """Tells in time, before anything is measured.

    Raises:
        OutriderError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OutriderError("plots need matplotlib: pip install 'outrider[bench]'")


def write_plots(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Writes a PNG for each question that the cells can answer.

    Args:
        cells: what was measured.
        directory: made if it is not there.

    Returns:
        What was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawings = {
        "throughput_by_concurrency": _throughput_by_concurrency,
        "latency_by_throughput": _latency_by_throughput,
        "acceptance_by_position": _acceptance_by_position,
        "speedup_by_k": _speedup_by_k,
        "speedup_by_round_trip": _speedup_by_round_trip,
    }
    return [path for name, draw in drawings.items() if _picture(path := directory / f"{name}.png", draw, cells)]


def _picture(path: Path, draw: "Callable[[Axes, Sequence[Cell]], bool]", cells: Sequence[Cell]) -> bool:
    """Saves what is drawn, if anything is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    axes.grid(alpha=0.3)
    if not draw(axes, cells):
        return False
    axes.legend()
    figure.savefig(path)
    return True


def _throughput_by_concurrency(axes: "Axes", cells: Sequence[Cell]) -> bool:
    points: Points = {}
    for cell, name, summary in _arms(cells):
        if cell.load.concurrency:
            points.setdefault(name, []).append((cell.load.concurrency, summary.output_per_s))
    axes.set(xlabel="requests at a time", ylabel="output tokens per second", ylim=(0, None))
    return _lines(axes, points)


def _latency_by_throughput(axes: "Axes", cells: Sequence[Cell]) -> bool:
    points: Points = {}
    for _, name, summary in _arms(cells):
        if summary.tpot is not None:
            points.setdefault(f"{name}, median", []).append((summary.output_per_s, summary.tpot.median * 1e3))
            points.setdefault(f"{name}, p99", []).append((summary.output_per_s, summary.tpot.p99 * 1e3))
    axes.set(xlabel="output tokens per second", ylabel="time per output token, ms")
    return _lines(axes, points)


def _acceptance_by_position(axes: "Axes", cells: Sequence[Cell]) -> bool:
    points: Points = {}
    for cell, name, summary in _arms(cells):
        if rates := acceptance_by_position(summary):
            points[f"{name}, {cell.load}"] = [(place, rate) for place, rate in enumerate(rates, 1) if rate is not None]
    axes.set(xlabel="position of the guess in its round", ylabel="accepted / drafted", ylim=(0, 1.02))
    return _lines(axes, points)


def _speedup_by_k(axes: "Axes", cells: Sequence[Cell]) -> bool:
    points: Points = {}
    for cell in cells:
        for each in cell.comparisons:
            if each.arm.startswith(K_ARM) and each.against == PLAIN and (speedup := each.speedup()):
                points.setdefault(_with_rtt(str(cell.load), cell), []).append((int(each.arm.removeprefix(K_ARM)), speedup.median))
    axes.set(xlabel="most guesses in a step, K", ylabel="speedup over no guesses")
    return _lines(axes, points)


def _speedup_by_round_trip(axes: "Axes", cells: Sequence[Cell]) -> bool:
    points: Points = {}
    for cell in cells:
        for each in cell.comparisons:
            if cell.rtt_ms is not None and each.against == PLAIN and (speedup := each.speedup()):
                points.setdefault(f"{each.arm}, {cell.load}", []).append((cell.rtt_ms, speedup.median))
    axes.set(xlabel="round trip between the services, ms", ylabel="speedup over no guesses")
    return any(len(line) > 1 for line in points.values()) and _lines(axes, points)


def _arms(cells: Iterable[Cell]) -> list[tuple[Cell, str, ArmSummary]]:
    return [(cell, _with_rtt(name, cell), summarise(runs)) for cell in cells for name, runs in cell.runs.items()]


def _with_rtt(name: str, cell: Cell) -> str:
    return name if cell.rtt_ms is None else f"{name}, RTT {cell.rtt_ms:g} ms"


def _lines(axes: "Axes", points: Points) -> bool:
    for name, line in points.items():
        axes.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
    return bool(points)
