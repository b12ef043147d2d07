"""The command line of `outrider bench`: flags in, tables and files out. What is measured, and how, is elsewhere."""

import asyncio
import json
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

_SERVICES = "What is measured"
_LOAD = "How requests come"
_ASKED = "What is asked"
_ARMS = "What is compared"
_OUTPUT = "Output"

_LISTS = frozenset({"--concurrency", "--rate", "--k"})

HELP = """Measure throughput, latency and acceptance, always beside plain decoding.

Every load is run with the drafter and without (`max_draft_tokens = 0`), pair by pair with the same prompts and seeds, in turns: A B, B A.
Against a running service (--address), a pair started here (--target, --draft), or stand-ins for both models (--simulate)."""


class BenchCommand(TyperCommand):
    """Takes `--concurrency 1 4 16` as well as `--concurrency 1,4,16`: there are no arguments that the numbers could be mistaken for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Joins the values of a list with commas."""
        joined: list[str] = []
        flag = ""
        for word in args:
            if not word.startswith("-") and flag in _LISTS and joined[-1] != flag:
                joined[-1] += f",{word}"
            else:
                flag = word if word.startswith("-") else flag
                joined.append(word)
        return super().parse_args(ctx, joined)


def _option(help_: str, panel: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **rest)


def bench_command(
    address: Annotated[str, _option("Verifier that runs already, host:port.", _SERVICES)] = "",
    metrics_address: Annotated[str, _option("Its metrics, for acceptance by position.", _SERVICES)] = "",
    target: Annotated[
        str | None, _option("Target model of a pair to start: hub id, directory or alias.", _SERVICES, show_default="SmolLM2-135M-Instruct")
    ] = None,
    draft: Annotated[str | None, _option("Its draft model: hub id or directory.", _SERVICES, show_default="n-gram lookup")] = None,
    assignments: Annotated[
        list[str] | None, _option("Any other setting of the pair, as for `outrider up`. Repeatable.", _SERVICES, "--set", metavar="SETTING=VALUE")
    ] = None,
    simulate: Annotated[
        str | None,
        _option(
            "No models, but stand-ins that take their time: target-ms=30,row-ms=0.1, draft-ms=2,draft-seq-ms=0.02, acceptance=0.8 (or 0.5:0.9, "
            "spread over the requests), rtt-ms=10 (or 1:10:20, one after the other).",
            _SERVICES,
            metavar="NAME=VALUE,...",
        ),
    ] = None,
    concurrency: Annotated[list[str] | None, _option("Closed loop: so many requests at a time.", _LOAD, metavar="N...", show_default="1")] = None,
    rate: Annotated[list[str] | None, _option("Open loop: so many requests a second, sent when they are due.", _LOAD, metavar="R...")] = None,
    burstiness: Annotated[float, _option("Of an open loop: 1 is Poisson, less comes in bursts, more is even.", _LOAD)] = 1.0,
    requests: Annotated[
        int | None, _option("Requests in a run.", _LOAD, min=1, show_default="two rounds of a closed loop, at least 8; 32 of an open one")
    ] = None,
    warmup: Annotated[int | None, _option("Requests of each arm beforehand.", _LOAD, min=1, show_default="one round, at least 2")] = None,
    prompts: Annotated[
        Path | None, _option('File: {"prompt": ...} or {"messages": ...} per line (.jsonl), or lines of text.', _ASKED, show_default="random ids")
    ] = None,
    chat: Annotated[bool, _option("Lines of text are users' messages.", _ASKED, "--chat")] = False,
    input_tokens: Annotated[str, _option("Length of made-up prompts: N, LOW:HIGH or lognormal:MEDIAN:SIGMA.", _ASKED)] = "128",
    output_tokens: Annotated[str, _option("Tokens to generate, likewise.", _ASKED)] = "128",
    temperature: Annotated[float, _option("0 is greedy.", _ASKED, min=0.0)] = 0.0,
    mode: Annotated[str | None, _option("Verification mode.", _ASKED, metavar="coupled|rejection", show_default="the server's")] = None,
    stop_at_eos: Annotated[bool, _option("End at the end-of-sequence token; without, all arms do the same work.", _ASKED, "--stop-at-eos")] = False,
    seed: Annotated[int, _option("Of prompts, arrivals and noise.", _ASKED, min=0)] = 0,
    deadline_s: Annotated[float, _option("Seconds after which a request has failed.", _ASKED, min=0.001)] = 600.0,
    pairs: Annotated[int, _option("Runs of each arm.", _ARMS, min=1)] = 7,
    k: Annotated[list[str] | None, _option("An arm for each K, the most guesses in a step.", _ARMS, "--k", metavar="K...")] = None,
    run_ahead: Annotated[
        int | None, _option("Another pair, whose drafter's window is one round and so many more; 0: it waits for each commit.", _ARMS, min=0)
    ] = None,
    no_drafter: Annotated[bool, _option("Another verifier that never saw a drafter.", _ARMS, "--no-drafter")] = False,
    json_file: Annotated[Path | None, _option("All figures, raw values of each pair, environment and settings.", _OUTPUT, "--json")] = None,
    texts: Annotated[bool, _option("Keep the tokens of every request in it.", _OUTPUT, "--texts")] = False,
    plots: Annotated[Path | None, _option("Directory for PNG plots; needs the extra `bench`.", _OUTPUT)] = None,
) -> None:
    """Measure."""
    import uvloop

    from client.bench.bench import run_bench, write_json
    from client.bench.cell import Plan, Request
    from client.bench.options import BadOptions, Options, to_lengths, to_loads, to_models, whole_numbers
    from client.bench.plots import require_matplotlib, write_plots
    from client.bench.ratio import require_scipy
    from client.bench.report import to_record
    from client.bench.table import tables
    from client.up import until_terminated

    try:
        options = Options(
            address=address,
            metrics_address=metrics_address,
            models=to_models(target, draft, simulate),
            assignments=tuple(assignments or ()),
            loads=to_loads(concurrency or (), rate or (), burstiness),
            request=Request(temperature, mode, not stop_at_eos, deadline_s),
            plan=Plan(requests or 0, pairs, warmup or 0, seed),
            prompts=prompts,
            as_chat=chat,
            input_tokens=to_lengths("--input-tokens", input_tokens),
            output_tokens=to_lengths("--output-tokens", output_tokens),
            k=tuple(whole_numbers("--k", k, 0)) if k else (),
            run_ahead=run_ahead,
            alone=no_drafter,
        )
    except BadOptions as error:
        raise typer.BadParameter(str(error)) from None
    require_scipy()
    if plots is not None:
        require_matplotlib()
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:
        try:
            cells = uvloop.run(until_terminated(run_bench(options, status.update)))
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None
    Console(highlight=False).print(tables(cells))
    if json_file is not None:
        command = shlex.join(["outrider", *sys.argv[1:]])
        write_json(json_file, json.dumps(to_record(cells, command, asdict(options), texts), indent=1, default=str) + "\n")
    if plots is not None:
        for path in write_plots(cells, plots):
            console.print(f"wrote {path}", style="dim")
    if any(run.errors for cell in cells for runs in cell.runs.values() for run in runs):
        raise typer.Exit(1)
