"""Does Outrider compute on a GPU what it computes on a CPU, and how fast: one table in under five minutes.

    python -m tools.gpu_check [--device cuda] [--target DIR_OR_HUB_ID] [--draft DIR_OR_HUB_ID] [--json FILE]

Correctness in float32, against this machine's CPU: logits, greedy tokens of both scorers, sampled tokens from the same logits. Then times of a
step in the model's own number type by sequences and query tokens, with both scorers, and at last the pair over gRPC against the target alone, in
turns.
`--device cpu` runs all of it where there is no GPU, to try the check itself. The exit status is 1 if a check failed.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from client import Client
from client.bench.ratio import BOOTSTRAP, MIN_PAIRS, paired_ratio
from client.demo import wait_for_drafter
from client.pair import plan
from client.supervisor import Supervisor
from client.up import children, free_ports, line_writer, until_terminated
from shared.default_model import DEFAULT_TARGET, resolve
from shared.engine.forward_batch import Span
from shared.engine.model_loader import LoadedModel, load
from shared.engine.model_runner import ModelRunner
from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Pick, SamplingParams, TokenRules
from verifier_service.expansion import Scored, Scorer, expand

_BLOCK_SIZE = 16
_SCORERS: tuple[Scorer, ...] = ("expanded", "multi_query")
_SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=40, min_p=0.02))
_TOLERANCE = 1e-3  # of the largest logit: float32 sums in another order
_WARM_UP = 2
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table; `passed` is None for what is only measured."""

    part: str
    what: str
    found: str
    passed: bool | None = None


def compare_logits(expected: Tensor, found: Tensor) -> Line:
    """Logits against the CPU's.

    Args:
        expected: [R, V] float32.
        found: the same rows, on any device.
    """
    error, scale = (found.cpu() - expected).abs().max().item(), expected.abs().max().item()
    return Line("correctness", "logits, largest difference", f"{error:.2e} of {scale:.1f}", error <= _TOLERANCE * scale)


def compare_greedy(scorer: str, expected: Tensor, found: Tensor) -> Line:
    """Best tokens against the CPU's; they may differ only where the CPU itself can hardly tell two apart.

    Args:
        scorer: that made `found`.
        expected: [R, V] float32 logits of the CPU.
        found: the same rows, on any device.
    """
    best = expected.topk(2, dim=-1)
    differs = found.cpu().argmax(-1) != best.indices[:, 0]
    is_near_tie = best.values[:, 0] - best.values[:, 1] <= 2 * _TOLERANCE * expected.abs().max()
    num_wrong, num_ties = int((differs & ~is_near_tie).sum()), int((differs & is_near_tie).sum())
    return Line("correctness", f"greedy tokens, {scorer}", f"{num_wrong} of {len(expected)} differ, {num_ties} more at near-ties", num_wrong == 0)


def compare_sampled(logits: Tensor, device: torch.device) -> Line:
    """Tokens sampled from the very same logits on both devices must be the same tokens.

    Args:
        logits: [R, V] float32, on the CPU.
        device: the other one.
    """
    num_rows, num_ids = logits.shape
    num_different = 0
    for sampling in _SAMPLINGS:
        rules = TokenRules(sampling, 1, num_ids)
        picks = [Pick(rules, noise_key(row), range(1 + row)) for row in range(num_rows)]
        num_different += int((pick_tokens(logits, picks) != pick_tokens(logits.to(device), picks).cpu()).sum())
    drawn = len(_SAMPLINGS) * num_rows
    return Line("correctness", "sampled tokens from the same logits", f"{num_different} of {drawn} differ", num_different == 0)


def check_model(on_cpu: LoadedModel, on_device: LoadedModel, prompt_ids: Sequence[int], num_tokens: int = 24, k: int = 4) -> list[Line]:
    """All of correctness: a greedy text of the CPU, scored on the device in rounds of `k` guesses.

    Args:
        on_cpu: in float32.
        on_device: the same model, in float32.
        prompt_ids: at least 2.
        num_tokens: of the text, a multiple of k.
        k: guesses in a round.
    """
    length = len(prompt_ids) + num_tokens + k + 1
    text, expected = _write_greedily(on_cpu, prompt_ids, num_tokens + 1, length)
    lines: list[Line] = []
    for scorer in _SCORERS:
        found = _score_text(on_device, text, len(prompt_ids), k, scorer, length)
        if scorer == "multi_query":
            lines.append(compare_logits(expected[: len(found)], found))
        lines.append(compare_greedy(scorer, expected[: len(found)], found))
    return [*lines, compare_sampled(expected, on_device.device)]


def time_steps(model: LoadedModel, batches: Sequence[int], queries: Sequence[int], context: int, repeats: int) -> list[Line]:
    """Milliseconds of a verify pass by scorer, sequences and query tokens of each, as medians.

    Args:
        model: on the device that is timed.
        batches: sequences.
        queries: tokens of each sequence in the pass: 1 + guesses.
        context: tokens before them.
        repeats: passes timed.
    """
    tables = block_tables(max(batches), context + max(queries))
    runner = ModelRunner(model, sum(map(len, tables)), _BLOCK_SIZE)
    committed = [_some_ids(context, model.vocab_size, seed) for seed in range(max(batches))]
    for ids, table in zip(committed, tables, strict=True):
        runner.forward([Span(ids[:-1], 0, table, 0)])
    lines = []
    for batch in batches:
        for scorer in _SCORERS:
            times = []
            for count in queries:
                guesses = _some_ids(count - 1, model.vocab_size, count)
                step = [Scored(ids, context - 1, table, guesses) for ids, table in zip(committed[:batch], tables[:batch], strict=True)]
                spans = expand(step, model.vocab_size, scorer).spans
                times.append(f"{count}: {time_ms(lambda spans=spans: runner.forward(spans), model.device, repeats):.2f}")  # type: ignore[misc]
            lines.append(Line("step, ms by queries", f"{batch} sequences, {scorer}", "  ".join(times)))
    return lines


def time_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of `run`, its work on the device included."""
    times = []
    for index in range(_WARM_UP + repeats):
        _synchronise(device)
        began = time.perf_counter()
        run()
        _synchronise(device)
        if index >= _WARM_UP:
            times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def block_tables(num_sequences: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Blocks of sequences that are all as long."""
    each = -(-num_tokens // _BLOCK_SIZE)
    return [tuple(range(index * each, (index + 1) * each)) for index in range(num_sequences)]


async def time_pair(target: str, draft: str, device: str, k: int, num_tokens: int, pairs: int) -> list[Line]:
    """The pair over gRPC against the target alone, both greedy, A B, B A."""
    names = ("verifier.listen", "verifier.link", "draft.listen")
    addresses = [f"{name}=127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)]
    settings = [f"target={target}", f"draft={draft}", f"device={device}", f"max-draft-tokens={k}", "metrics=", "log-level=warning", *addresses]
    configured = plan(assignments=settings)
    plain: list[float] = []
    pair: list[float] = []
    async with Supervisor(children(configured), line_writer(Console(stderr=True)), _GRACE_S) as supervisor:
        await supervisor.wait_until_ready()
        async with Client(configured.verifier.listen) as client:
            await wait_for_drafter(client)
            for index in range(-1, pairs):  # the first is not counted: the first passes after loading are slow
                sides = [(plain, 0), (pair, k)]
                for rates, max_draft_tokens in sides if index % 2 == 0 else reversed(sides):
                    rate = await _tokens_per_s(client, index, num_tokens, max_draft_tokens)
                    if index >= 0:
                        rates.append(rate)
    speedup = paired_ratio(pair, plain)
    return [
        Line("pair over gRPC", f"tokens/s alone; with drafter, K = {k}", f"{median(plain):.1f}; {median(pair):.1f}"),
        Line("pair over gRPC", f"speedup {BOOTSTRAP}, {speedup.num_pairs} pairs", str(speedup)),
    ]


async def _tokens_per_s(client: Client, seed: int, num_tokens: int, max_draft_tokens: int) -> float:
    completion = await client.complete(
        f"Count from {seed + 2} to one thousand: {seed + 2}, {seed + 3},",
        temperature=0.0,
        seed=max(seed, 0),
        max_tokens=num_tokens,
        ignore_eos=True,
        max_draft_tokens=max_draft_tokens,
    )
    timings = completion.timings
    return (timings.received_tokens - 1) / (timings.total_s - (timings.ttft_s or 0.0))


def _write_greedily(model: LoadedModel, prompt_ids: Sequence[int], num_tokens: int, length: int) -> tuple[list[int], Tensor]:
    """The prompt with a greedy text behind it, and the [num_tokens, vocab] logits that its tokens were taken from."""
    (table,) = block_tables(1, length)
    runner, text, rows = ModelRunner(model, len(table), _BLOCK_SIZE), list(prompt_ids), []
    done = 0
    for _ in range(num_tokens):
        rows.append(runner.forward([Span(text[done:], done, table, 1)]))
        done = len(text)
        text.append(int(rows[-1].argmax()))
    return text, torch.cat(rows)


def _score_text(model: LoadedModel, text: Sequence[int], start: int, k: int, scorer: Scorer, length: int) -> Tensor:
    """Logits of the text's tokens from `start` on, from rounds of `k` guesses that are all right. [a multiple of k + 1, vocab]"""
    (table,) = block_tables(1, length)
    runner, rows = ModelRunner(model, len(table), _BLOCK_SIZE), []
    runner.forward([Span(text[: start - 1], 0, table, 0)])
    for end in range(start, len(text) - k, k + 1):
        step = Scored(text[:end], end - 1, table, text[end : end + k])
        rows.append(runner.forward(expand([step], model.vocab_size, scorer).spans))
    return torch.cat(rows)


def _some_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    return [(7919 * (seed + 1) + 104_729 * index) % vocab_size for index in range(count)]


def _synchronise(device: torch.device) -> None:
    """Waits for what was put on the device: without it only the launching is timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tabulate(lines: Sequence[Line], title: str) -> Table:
    """All lines, part by part."""
    table = Table("part", "what", "found", "", title=title)
    for index, line in enumerate(lines):
        verdict = {None: "", True: "[green]passed", False: "[red]FAILED"}[line.passed]
        is_last = index + 1 == len(lines) or lines[index + 1].part != line.part
        table.add_row(line.part, line.what, line.found, verdict, end_section=is_last)
    return table


def _describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device}: {name}, torch {torch.__version__}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:n, or cpu to try the check itself")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="target model: alias, directory or hub id")
    parser.add_argument("--draft", default=DEFAULT_TARGET, help="draft model, likewise; with the target's tokenizer")
    parser.add_argument("--k", type=int, default=4, help="most guesses in a round of the pair")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="sequences in a step")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="tokens of each")
    parser.add_argument("--context", type=int, default=512, help="tokens before them")
    parser.add_argument("--repeats", type=int, default=7, help="passes timed for each")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion of the pair")
    parser.add_argument("--json", help="file for all that was found")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("this PyTorch sees no CUDA device; --device cpu tries the check itself")
    target, draft = resolve(arguments.target), resolve(arguments.draft)
    on_device = load(target, "float32", arguments.device)
    lines = check_model(load(target, "float32", "cpu"), on_device, _some_ids(64, on_device.vocab_size, 0))
    lines += time_steps(load(target, "auto", arguments.device), arguments.batches, arguments.queries, arguments.context, arguments.repeats)
    lines += asyncio.run(until_terminated(time_pair(target, draft, arguments.device, arguments.k, arguments.tokens, MIN_PAIRS)))
    title = f"{_describe(on_device.device)}, {time.monotonic() - began:.0f} s"
    Console().print(tabulate(lines, title))
    if arguments.json:
        record = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": title, **vars(arguments)}
        Path(arguments.json).write_text(json.dumps({**record, "lines": [asdict(line) for line in lines]}))
    sys.exit(any(line.passed is False for line in lines))


if __name__ == "__main__":
    main()
