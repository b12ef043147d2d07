"""What it costs to get from logits to tokens, against the pass that the logits come from, and against noise for every token.

    python -m bench.picking --model DIR --sequences 16 --context 512 --guesses 4 --json picking.json

The logits are those of a text of code, one row per token to be picked, and two synthetic sets: all tokens alike, and a few far above the
rest. Each line is measured in turns with a verify pass of as many rows, A B B A. "Picking" is everything from the logits as the model
gives them to token ids that the host has read, the check for rows that cannot be picked from included; "plain" computes every token's
noise in float64, tile by tile, which is the definition. Both must pick the same tokens, or the command fails.
"""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.engine import Bench, timed
from client.bench.ratio import MIN_PAIRS, Ratio, interleave, paired_ratio
from shared.engine.forward_batch import Span
from shared.engine.model_loader import LoadedModel, load
from shared.engine.model_runner import ModelRunner
from shared.noise import key_tensor, noise_key
from shared.picking import pick_usable, process, search_all
from shared.sampling import Pick, SamplingParams, TokenRules
from shared.tokenizer import load_tokenizer

_TEXT = Path(__file__).resolve().parents[1] / "shared" / "picking.py"
_BLOCK_SIZE = 16
_SAMPLINGS = {
    "T = 1": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "T = 0.7, top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of rows: medians in milliseconds; the share is picking over the verify pass."""

    logits: str
    sampling: str
    picking_ms: float
    pass_ms: float
    share: Ratio
    plain_ms: float | None
    plain_over_ours: Ratio | None


class Picking:
    """A verify pass of a model, and rows of logits like those that it gives."""

    def __init__(self, model: LoadedModel, num_sequences: int, context: int, num_guesses: int) -> None:
        tokenizer = load_tokenizer(model.name)
        self._vocab_size = tokenizer.vocab_size
        self._shape = (num_sequences, context, num_guesses)
        self._num_rows = num_sequences * (num_guesses + 1)
        bench = Bench(model, num_sequences, context, num_guesses)
        self.verify = bench.step(bench.spans(num_sequences, "multi_query"))
        real = _logits_of(model, tokenizer.encode(_TEXT.read_text(encoding="utf-8")), self._num_rows)
        noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(1))
        self.logits = {"code": real, "flat": torch.zeros_like(real), "peaked": (noise * 10).to(real.dtype)}

    def picks(self, sampling: SamplingParams) -> list[Pick]:
        """One per row, sequence by sequence."""
        num_sequences, context, num_guesses = self._shape
        rules = [TokenRules(sampling, context, self._vocab_size) for _ in range(num_sequences)]
        text = [0] * (context + num_guesses)
        return [
            Pick(rules[number], noise_key(number), text[:context], text[context : context + row])
            for number in range(num_sequences)
            for row in range(num_guesses + 1)
        ]


def _logits_of(model: LoadedModel, text: list[int], num_rows: int) -> Tensor:
    """What the model says behind `num_rows` tokens in the middle of a text."""
    token_ids = text[: 3 * num_rows]
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    return ModelRunner(model, num_blocks, _BLOCK_SIZE).forward([Span(token_ids, 0, list(range(num_blocks)), num_rows)])


def pick(logits: Tensor, picks: list[Pick]) -> list[int]:
    """From logits to ids on the host, as the verifier does it."""
    token_ids: list[int] = pick_usable(process(logits, picks), picks).tolist()
    return token_ids


def pick_plainly(logits: Tensor, picks: list[Pick]) -> list[int]:
    """The same by the definition, for rows at T > 0."""
    keys, positions = key_tensor((each.key for each in picks), logits.device), torch.tensor([each.position for each in picks], device=logits.device)
    token_ids: list[int] = search_all(process(logits, picks), keys, positions).tolist()
    return token_ids


def compare(picking: Picking, kind: str, name: str, pairs: int) -> Row:
    """One line of the table.

    Raises:
        SystemExit: the two ways pick different tokens.
    """
    logits, picks = picking.logits[kind], picking.picks(_SAMPLINGS[name])
    ours = timed(lambda: pick(logits, picks))
    ours_ms, pass_ms = interleave(ours, picking.verify, pairs)
    share = paired_ratio(ours_ms, pass_ms)
    if name != "T = 1":
        return Row(kind, name, median(ours_ms), median(pass_ms), share, None, None)
    if pick(logits, picks) != pick_plainly(logits, picks):
        raise SystemExit(f"{kind}, {name}: the picks are not those of the definition")
    plain_ms, again_ms = interleave(timed(lambda: pick_plainly(logits, picks)), ours, pairs)
    return Row(kind, name, median(ours_ms), median(pass_ms), share, median(plain_ms), paired_ratio(plain_ms, again_ms))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--logits", nargs="+", choices=["code", "flat", "peaked"], default=["code", "flat", "peaked"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or os.cpu_count() or 1)
    model = load(arguments.model, arguments.dtype)
    picking = Picking(model, arguments.sequences, arguments.context, arguments.guesses)
    rows = [compare(picking, kind, name, arguments.pairs) for kind in arguments.logits for name in _SAMPLINGS if kind == "code" or name == "T = 1"]
    num_rows, num_ids = picking.logits["code"].shape
    table = Table(title=f"{Path(arguments.model).name}: {num_rows} rows of {num_ids} logits, {torch.get_num_threads()} threads")
    for heading in ("logits", "sampling", "picking ms", "pass ms", "picking / pass", "plain ms", "plain / picking"):
        table.add_column(heading, justify="left" if heading in ("logits", "sampling") else "right")
    for row in rows:
        plain = ("", "") if row.plain_ms is None else (f"{row.plain_ms:.0f}", str(row.plain_over_ours))
        table.add_row(row.logits, row.sampling, f"{row.picking_ms:.1f}", f"{row.pass_ms:.1f}", str(row.share), *plain)
    Console(width=120).print(table)
    if arguments.json:
        settings = {**vars(arguments), "json": None, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"settings": settings, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
