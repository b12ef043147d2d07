"""Ours against a peer: the same prompts on both, in turns, one right after the other.

    python -m bench.peers.run --case plain-1 pair-1-t0 --target DIR --draft DIR --peers-python PEERS/bin/python --json peers.json

Starts our services and the peer's worker; only the one that is asked runs, the other stands still. Every pair is saved as it ends: the
same command goes on where the last one stopped. `--table` only prints what is saved. README.md says how to make the peers' environment.
"""

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.peers import ours
from bench.peers.cases import CASES, PROMPTS, Case, Pair, common_share, compare, from_record, missing_pairs, pick_prompts, to_figures, to_record
from bench.peers.lines import Answer, Job
from bench.peers.worker import Worker
from client.bench.ratio import BOOTSTRAP, COVERAGE, MIN_PAIRS
from client.up import until_terminated

_IDLE_S = 1.0
_BUSY = 0.1
_WARM_UP_TOKENS = 24

Run = Callable[[Job], Awaitable[Answer]]


def main() -> None:
    """The command."""
    arguments = _parse()
    saved = Saved(Path(arguments.json))
    if not arguments.table:
        for name in arguments.case:
            asyncio.run(until_terminated(_measure(_override(CASES[name], arguments), arguments, saved)))
    Console().print(summarise(saved))


class Saved:
    """The file of results: pairs by case and settings, written after every pair.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def pairs(self, key: str) -> list[Pair]:
        """What is there."""
        return [from_record(record) for record in self.entries.get(key, {"pairs": []})["pairs"]]

    def add(self, key: str, settings: Mapping[str, Any], pair: Pair) -> None:
        """Keep a pair."""
        entry = self.entries.setdefault(key, {"pairs": []})
        entry |= settings
        entry["pairs"].append(to_record(pair))
        written = self._path.with_suffix(".part")
        written.write_text(json.dumps(self.entries, indent=1))
        written.replace(self._path)  # at one stroke: a run that is ended meanwhile loses no earlier pair


def summarise(saved: Saved) -> Table:
    """A section for each case and its settings."""
    table = Table("case", "median", "ours", "peer", f"ratio {BOOTSTRAP}", caption=f"In brackets {COVERAGE}.")
    for key in saved.entries:
        pairs = saved.pairs(key)
        table.add_section()
        table.add_row(key, "tok/s", *_medians(pairs, "tokens_per_s"), str(compare(pairs, "tokens_per_s")))
        table.add_row(f"{len(pairs)} pairs", "tok/s, decoding", *_medians(pairs, "decode_per_s"), str(compare(pairs, "decode_per_s")))
        if any(pair.ours.accepted_per_round is not None for pair in pairs):
            table.add_row("", "accepted per round", *_medians(pairs, "accepted_per_round"), "")
        table.add_row("", "same text", f"{median(pair.common for pair in pairs):.0%}", "", "")
        table.add_row("", "others' CPU, at most", f"{max(pair.others_cpu for pair in pairs):.0%}", "", "")
    return table


def _medians(pairs: Sequence[Pair], name: str) -> list[str]:
    """Ours and the peer's, of what is known."""
    sides = [[getattr(side, name) for side in (pair.ours, pair.peer)] for pair in pairs]
    known = [[figure for figure in column if figure is not None] for column in zip(*sides, strict=True)]
    return [f"{median(column):.2f}" if column else "-" for column in known]


async def _measure(case: Case, arguments: argparse.Namespace, saved: Saved) -> None:
    key = _key(case, [*arguments.peer_flag, *arguments.set])
    todo = missing_pairs(saved.pairs(key), arguments.pairs)
    if not todo:
        return
    prompts = _tokenise(arguments.target)
    log = Path(arguments.json)
    console = Console(stderr=True)
    console.print(f"{key}: loading")
    async with (
        Worker(_worker_command(case, arguments), log.with_suffix(f".{case.engine}.log")) as worker,
        ours.serve(arguments.target, arguments.draft if case.drafts else None, arguments.set, log.with_suffix(".ours.log")) as client,
    ):

        async def run_ours(job: Job) -> Answer:
            return await ours.run(client, job)

        console.print(f"{key}: {worker.description}")
        for run in (run_ours, worker.ask):  # the first passes after loading are slow
            await run(_job(case, prompts, 0, min(case.max_tokens, _WARM_UP_TOKENS)))
        for index in todo:
            pair = await _pair(case, prompts, index, run_ours, worker.ask)
            saved.add(key, {"case": dataclasses.asdict(case), "peer": dict(worker.description), "set": arguments.set}, pair)
            busy = f", {pair.others_cpu:.0%} of the CPU taken by others" if pair.others_cpu > _BUSY else ""
            console.print(f"{key}: pair {index}: {pair.ours.tokens_per_s:.2f} and {pair.peer.tokens_per_s:.2f} tok/s{busy}")


async def _pair(case: Case, prompts: list[tuple[int, ...]], index: int, run_ours: Run, run_peer: Run) -> Pair:
    """The same job on both, the order changing from pair to pair."""
    psutil.cpu_percent()
    await asyncio.sleep(_IDLE_S)  # the time that is looked at
    others_cpu = psutil.cpu_percent() / 100
    job = _job(case, prompts, index, case.max_tokens)
    answers = {}
    for run in (run_ours, run_peer) if index % 2 == 0 else (run_peer, run_ours):
        answers[run] = await run(job)
    of_ours, of_peer = answers[run_ours], answers[run_peer]
    return Pair(index, others_cpu, to_figures(of_ours), to_figures(of_peer), common_share(of_ours.token_ids, of_peer.token_ids))


def _job(case: Case, prompts: list[tuple[int, ...]], index: int, max_tokens: int) -> Job:
    chosen = tuple(prompts[at] for at in pick_prompts(index, case.num_requests))
    return Job(chosen, max_tokens, case.temperature, seed=1000 * index)


def _key(case: Case, given: list[str]) -> str:
    """Name of a case with all that may be told on the command line: figures under other settings are kept apart."""
    parts = [f"{case.name}, {case.max_tokens} tokens", *([f"K={case.k}"] if case.drafts else [])]
    return " ".join([*parts, *([case.draft_sampling] if case.engine == "vllm" and case.drafts and case.temperature > 0 else []), *given])


def _override(case: Case, arguments: argparse.Namespace) -> Case:
    given = {"max_tokens": arguments.tokens, "k": arguments.k, "draft_sampling": arguments.draft_sampling}
    return dataclasses.replace(case, **{name: setting for name, setting in given.items() if setting is not None})


def _worker_command(case: Case, arguments: argparse.Namespace) -> list[str]:
    command: list[str] = [arguments.peers_python, "-m", f"bench.peers.{case.engine}_worker", "--target", arguments.target]
    if case.drafts:
        command += ["--draft", arguments.draft, "--k", str(case.k)]
        if case.engine == "vllm":
            command += ["--draft-sampling", case.draft_sampling]
    return [*command, *arguments.peer_flag]


def _tokenise(target: str) -> list[tuple[int, ...]]:
    """All prompts with the target's chat template: both get the same ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True, tokenize=False) for each in PROMPTS]
    return [tuple(tokenizer.encode(str(text), add_special_tokens=False)) for text in texts]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=[], help="what to measure", metavar="CASE")
    parser.add_argument("--target", help="target model: directory or hub id")
    parser.add_argument("--draft", help="draft model: directory or hub id")
    parser.add_argument("--peers-python", help="interpreter of the peers' environment")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help="pairs of runs for each case")
    parser.add_argument("--tokens", type=int, help="tokens of each request, instead of the case's")
    parser.add_argument("--k", type=int, help="the peer's draft tokens of a round, instead of the case's")
    parser.add_argument("--draft-sampling", choices=["greedy", "probabilistic"], help="of vLLM at T > 0, instead of the case's")
    parser.add_argument("--peer-flag", action="append", default=[], metavar="FLAG", help="further flag of the worker, as --peer-flag=--openmp=gnu")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="a setting of ours, as for `outrider up`")
    parser.add_argument("--json", required=True, help="file of all pairs; what it has is not measured again")
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    arguments = parser.parse_args()
    cases = [CASES[name] for name in arguments.case]
    needed = {"target": bool(cases), "peers_python": bool(cases), "draft": any(case.drafts for case in cases)}
    missing = [f"--{name.replace('_', '-')}" for name, is_needed in needed.items() if is_needed and not getattr(arguments, name)]
    if missing:
        parser.error(f"needed: {', '.join(missing)}; cases are {', '.join(CASES)}")
    return arguments


if __name__ == "__main__":
    main()
