"""What a forward pass costs and where: steps against their own linear layers and against memory, the two scorers, int8 weights.

    python -m bench.engine --model DIR --sequences 1 4 16 --context 512 --guesses 4 --json engine.json

Every line is a pair that was measured in turns, A B B A. "Linears" are the model's own packed layers timed alone, one after the
other, with the same threads; "copy" is the time in which memory copies as many bytes as the weights have, reading and writing
counted. Attention alone is every layer's store and attention for one pass, index tensors included.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from client.bench.ratio import BOOTSTRAP, MIN_PAIRS, Ratio, interleave, paired_ratio
from shared.engine.attention import AttentionCall, run_with, write_then_attend
from shared.engine.decoder_layer import packed_layers
from shared.engine.forward_batch import Span, build
from shared.engine.model_loader import LoadedModel, load
from shared.engine.model_runner import ModelRunner
from verifier_service.expansion import Scored, Scorer, expand

_BLOCK_SIZE = 16
_COPIED = 256 << 20  # bytes: far more than any cache holds


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: medians in milliseconds, and the ratio of A to B."""

    what: str
    num_sequences: int
    a_ms: float
    b_ms: float
    ratio: Ratio


class Bench:
    """A model with `num_sequences` sequences of `context` tokens in its cache, all the same text in blocks of their own."""

    def __init__(self, model: LoadedModel, num_sequences: int, context: int, num_guesses: int) -> None:
        self.model = model
        self.context = context
        self.num_guesses = num_guesses
        num_blocks = -(-(context + num_guesses) // _BLOCK_SIZE)
        self.runner = ModelRunner(model, num_sequences * num_blocks, _BLOCK_SIZE)
        self.tables = [list(range(first, first + num_blocks)) for first in range(0, num_sequences * num_blocks, num_blocks)]
        generator = torch.Generator().manual_seed(0)
        self.token_ids = torch.randint(0, min(model.vocab_size, 30_000), (context + num_guesses,), generator=generator).tolist()
        self.runner.forward([Span(self.token_ids, 0, self.tables[0], 0)])
        for cached in [*self.runner.cache.keys, *self.runner.cache.values]:
            cached.copy_(cached[:num_blocks].repeat(num_sequences, 1, 1, 1))

    def spans(self, num_sequences: int, scorer: Scorer | None) -> Sequence[Span]:
        """A plain step, or a verification by a scorer."""
        committed, guesses = self.token_ids[: self.context], self.token_ids[self.context :] if scorer else []
        scored = [Scored(committed, self.context - 1, table, guesses) for table in self.tables[:num_sequences]]
        return expand(scored, self.model.vocab_size, scorer or "multi_query").spans

    def step(self, spans: Sequence[Span]) -> Callable[[], float]:
        """The whole pass."""
        return timed(lambda: self.runner.forward(spans))

    def attention(self, spans: Sequence[Span]) -> Callable[[], float]:
        """All layers' attention, with the queries, keys and values of a real pass."""
        calls: list[AttentionCall] = []
        cache, device = self.runner.cache, self.model.device

        def note(call: AttentionCall) -> Tensor:
            calls.append(call)
            return write_then_attend(cache, batch, call)

        batch = build(spans, _BLOCK_SIZE, device)
        with torch.inference_mode():
            run_with(self.model.model, note, batch)

        def attend() -> None:
            fresh = build(spans, _BLOCK_SIZE, device)
            for call in calls:
                write_then_attend(cache, fresh, call)

        return timed(attend)

    def linears(self, num_rows: int) -> Callable[[], float]:
        """All packed layers, one after the other."""
        layers = packed_layers(self.model.model)
        inputs = {layer.in_features: torch.randn(1, num_rows, layer.in_features, dtype=self.model.dtype) for layer in layers}

        def run() -> None:
            for layer in layers:
                layer(inputs[layer.in_features])

        return timed(run)


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """The same work as a measurement in milliseconds; it has been done once, so that what is built at first use is there."""

    @torch.inference_mode()
    def measure() -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3

    measure()
    return measure


def copy_of(num_bytes: int) -> Callable[[], float]:
    """Milliseconds in which memory copies so many bytes, reading and writing counted."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    measure = timed(lambda: target.copy_(source))
    return lambda: measure() * num_bytes / (2 * _COPIED)


def compare(what: str, num_sequences: int, a: Callable[[], float], b: Callable[[], float], pairs: int) -> Row:
    """Measures two things in turns."""
    a_ms, b_ms = interleave(a, b, pairs)
    return Row(what, num_sequences, median(a_ms), median(b_ms), paired_ratio(a_ms, b_ms))


def rows_of(model: LoadedModel, rounded: LoadedModel | None, sequences: Sequence[int], context: int, num_guesses: int, pairs: int) -> list[Row]:
    """All comparisons."""
    bench = Bench(model, max(sequences), context, num_guesses)
    num_bytes = sum(layer.num_bytes for layer in packed_layers(model.model))
    rows = []
    for num_sequences in sequences:
        plain = bench.step(bench.spans(num_sequences, None))
        if num_bytes:
            rows.append(compare("plain step / linears", num_sequences, plain, bench.linears(num_sequences), pairs))
            rows.append(compare("plain step / copy", num_sequences, plain, copy_of(num_bytes), pairs))
        expanded, together = bench.spans(num_sequences, "expanded"), bench.spans(num_sequences, "multi_query")
        rows.append(compare("attention: expanded / multi_query", num_sequences, bench.attention(expanded), bench.attention(together), pairs))
        rows.append(compare("verify pass: expanded / multi_query", num_sequences, bench.step(expanded), bench.step(together), pairs))
    if rounded is not None:
        other = Bench(rounded, max(sequences), context, num_guesses)
        for num_sequences in sequences:
            native, int8 = (each.step(each.spans(num_sequences, None)) for each in (bench, other))
            rows.append(compare("plain step: native / int8", num_sequences, native, int8, pairs))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--int8", action="store_true", help="compare with int8 weights too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or os.cpu_count() or 1)
    model = load(arguments.model, arguments.dtype)
    rounded = load(arguments.model, arguments.dtype, weights="int8") if arguments.int8 else None
    rows = rows_of(model, rounded, arguments.sequences, arguments.context, arguments.guesses, arguments.pairs)
    table = Table(title=f"{Path(arguments.model).name}, context {arguments.context}, K = {arguments.guesses}, {torch.get_num_threads()} threads")
    for heading in ("A / B", "sequences", "A ms", "B ms", "ratio", BOOTSTRAP):
        table.add_column(heading, justify="left" if heading == "A / B" else "right")
    for row in rows:
        interval = f"{row.ratio.low:.3f} - {row.ratio.high:.3f}"
        table.add_row(row.what, str(row.num_sequences), f"{row.a_ms:.1f}", f"{row.b_ms:.1f}", f"{row.ratio.median:.3f}", interval)
    Console().print(table)
    if arguments.json:
        settings = {**vars(arguments), "json": None, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"settings": settings, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
