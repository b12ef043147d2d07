"""The pair against the target alone: tokens per second, acceptance, and how often the two texts differ.

    python -m bench.pair --target DIR_OR_HUB_ID --draft DIR_OR_HUB_ID [--tokens 128] [--temperature 0 1] [--json FILE]

Starts both services on this machine with `outrider up`'s settings, and runs each prompt twice, without and with the drafter, one right
after the other, so that a slow minute of the machine hits both. Ratios are medians over the prompts of one run.
"""

import argparse
import asyncio
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.prompts import CODE_PROMPTS
from client import Client, Completion
from client.demo import wait_for_drafter
from client.pair import plan
from client.supervisor import Supervisor
from client.up import children, line_writer

_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """One completion.

    Args:
        tokens_per_s: after the first token.
        token_ids: the text, as ids.
        rounds: verifications with guesses.
        drafted: guesses scored.
        accepted: of those, the accepted ones.
    """

    tokens_per_s: float
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Result:
    """All prompts at one temperature; the first difference is the index of the first token that is not the same, None if none is."""

    temperature: float
    plain: tuple[Run, ...]
    pair: tuple[Run, ...]
    first_difference: tuple[int | None, ...]


async def measure(client: Client, temperature: float, num_tokens: int, prompts: Sequence[str]) -> Result:
    """Runs every prompt without and with the drafter, the order changing from prompt to prompt (A B, B A, ...)."""
    plain: list[Run] = []
    pair: list[Run] = []
    for index, prompt in enumerate(prompts):
        order = [(plain, 0), (pair, None)] if index % 2 == 0 else [(pair, None), (plain, 0)]
        for runs, max_draft_tokens in order:
            options = {} if max_draft_tokens is None else {"max_draft_tokens": max_draft_tokens}
            completion = await client.complete(
                [{"role": "user", "content": prompt}],
                temperature=temperature,
                seed=index,
                max_tokens=num_tokens,
                ignore_eos=True,
                **options,
            )
            runs.append(_to_run(completion))
    differences = tuple(_first_difference(a.token_ids, b.token_ids) for a, b in zip(plain, pair, strict=True))
    return Result(temperature, tuple(plain), tuple(pair), differences)


def _to_run(completion: Completion) -> Run:
    usage, timings = completion.usage, completion.timings
    decode_s = timings.total_s - (timings.ttft_s or 0.0)
    return Run(
        tokens_per_s=(timings.received_tokens - 1) / decode_s,
        token_ids=tuple(completion.token_ids),
        rounds=usage.rounds,
        drafted=usage.drafted_tokens,
        accepted=usage.accepted_tokens,
    )


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def summarise(results: Sequence[Result]) -> Table:
    """A row per temperature."""
    table = Table("T", "plain tok/s", "pair tok/s", "speedup", "acceptance", "mean accepted length", "texts that differ", "first differences")
    for result in results:
        accepted, drafted, rounds = (sum(getattr(run, name) for run in result.pair) for name in ("accepted", "drafted", "rounds"))
        ratios = [pair.tokens_per_s / plain.tokens_per_s for plain, pair in zip(result.plain, result.pair, strict=True)]
        differing = [at for at in result.first_difference if at is not None]
        compared = sum(len(run.token_ids) if at is None else at + 1 for run, at in zip(result.plain, result.first_difference, strict=True))
        table.add_row(
            f"{result.temperature:g}",
            f"{median(run.tokens_per_s for run in result.plain):.2f}",
            f"{median(run.tokens_per_s for run in result.pair):.2f}",
            f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{accepted / drafted:.3f} ({accepted}/{drafted})",
            f"{1 + accepted / rounds:.2f}",
            f"{len(differing)} of {len(result.plain)}",
            f"{len(differing)} in {compared} ({len(differing) / compared:.2%})",
        )
    return table


async def _run(arguments: argparse.Namespace) -> list[Result]:
    draft_flags = ["--draft", arguments.draft] if arguments.draft else []
    pair = plan(["--target", arguments.target, "--max-draft-tokens", str(arguments.k)], draft_flags, arguments.set)
    async with Supervisor(children(pair), line_writer(Console(stderr=True)), _GRACE_S) as supervisor:
        await supervisor.wait_until_ready()
        async with Client(pair.verifier.listen) as client:
            await wait_for_drafter(client)
            await measure(client, 0.0, 16, CODE_PROMPTS[:2])  # the first passes after loading are slow
            return [await measure(client, temperature, arguments.tokens, CODE_PROMPTS) for temperature in arguments.temperature]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target model: directory or hub id")
    parser.add_argument("--draft", help="draft model: directory or hub id; n-gram lookup without")
    parser.add_argument("--k", type=int, default=4, help="most draft tokens scored in a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="any other setting, as for `outrider up`")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    results = asyncio.run(_run(arguments))
    Console().print(summarise(results))
    if arguments.json:
        record = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": platform.processor(), **vars(arguments)}
        Path(arguments.json).write_text(json.dumps({**record, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
