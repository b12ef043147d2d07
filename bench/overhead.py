"""What our code and gRPC take of a round beyond the two forwards, and how that compares with gRPC alone.

    python -m bench.overhead [--sequences 1 64] [--k 4] [--target-ms 30] [--draft-ms 2] [--pairs 7] [--rounds 40] [--json FILE]

Both services run as two processes, in lock step, with stand-ins for their models, which sleep; this process reads the streams. The time between two
outputs of a stream, less the sleeps, is the overhead: commit, guesses, picking, output, and all that gRPC does. Taken off are a pass of the target,
and of the draft the passes that the services' counters say were made in a round and awaited, each as long as such a sleep really takes here. A pass
whose guesses arrive while the verifier computes costs the round nothing. The number of passes is a mean over the rounds of a segment: percentiles are
exact as far as its rounds are alike. Beside it, in turns (A B, B A), as many messages of the same sizes run through handlers that do nothing
(`bench.empty`), in the same layout of processes and with the same sleeps.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TypeAlias

import grpc
import uvloop
from outrider.v1 import generate_pb2, verifier_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.empty import Traffic
from client import Client
from client.bench.ratio import BOOTSTRAP, Ratio, paired_ratio
from client.demo import wait_for_drafter
from client.pair import Pair, plan
from client.scrape import read_by_label, read_samples, scrape_text
from client.supervisor import Child, Supervisor
from client.up import children, free_ports, line_writer, until_terminated
from shared.rpc.channel import open_channel

_Stub: TypeAlias = "verifier_pb2_grpc.VerifierServiceAsyncStub"  # there in the stubs' types only
_GRACE_S = 10.0
_WARM_UP = 5  # outputs of each stream that are not counted: the prompt, and the pace being found
_PROMPT_TOKENS = 256
_NUM_SLEEPS = 25
_SETTLE_S = 1.2  # the verifier brings its counts of arrived guesses up to date once a second
_VOCAB = 200  # ids of the prompts are below it
_ADDRESSES = ("verifier.listen", "verifier.link", "verifier.metrics", "draft.listen", "draft.metrics")


@dataclass(frozen=True, slots=True)
class Segment:
    """Rounds measured in one go.

    Args:
        p50_ms: overhead of a round, median over all streams.
        p90_ms: likewise.
        num_pieces: ProposalBatches per round.
        num_guesses: scored for each sequence and round that has some.
        num_tokens: given out for each sequence and round.
        num_passes: of the draft per round.
        num_awaited: of those, the ones whose guesses did not arrive while the verifier computed.
        asleep_ms: what was taken off each round, mean.
    """

    p50_ms: float
    p90_ms: float
    num_pieces: float
    num_guesses: float
    num_tokens: float
    num_passes: float
    num_awaited: float
    asleep_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """All segments with so many sequences, by pair."""

    num_sequences: int
    ours: tuple[Segment, ...]
    empty: tuple[Segment, ...]

    @property
    def ratio(self) -> Ratio:
        """Ours over empty handlers, p50."""
        return paired_ratio([segment.p50_ms for segment in self.ours], [segment.p50_ms for segment in self.empty])


async def measure_ours(stub: _Stub, pair: Pair, count: int, k: int, num_rounds: int, target_ms: float, draft_ms: float) -> Segment:
    """A segment of `num_rounds` rounds of `count` sequences on the real services, whose passes sleep `target_ms` and `draft_ms`."""
    requests = [_request(index, k) for index in range(count)]
    early: list[asyncio.Task[dict[str, float]]] = []
    streams = await _read_streams(stub, requests, num_rounds, lambda: early.append(asyncio.create_task(_counters(pair))))
    await asyncio.sleep(_SETTLE_S)
    before, after = await early[0], await _counters(pair)
    per_round = to_rounds({name: after[name] - before[name] for name in after})
    asleep_ms = target_ms + per_round["awaited"] * draft_ms
    gaps = [1e3 * (later - earlier) - asleep_ms for stream in streams for (earlier, _), (later, _) in _pairs(stream)]
    num_tokens = fmean(len(output.token_ids) for stream in streams for _, output in stream[_WARM_UP:])
    return _segment(gaps, per_round["proposals"], per_round["guesses"], num_tokens, per_round["passes"], per_round["awaited"], asleep_ms)


def to_rounds(grown: Mapping[str, float]) -> dict[str, float]:
    """What counters grew by, per round.

    Returns:
        `proposals` and `passes` as they are; `awaited`: the share of passes that the share of awaited guesses says, for every guess of a pass arrives
        at once; `guesses` per verification that had some.
    """
    proposals, passes = (grown[name] / max(1.0, grown["rounds"]) for name in ("proposals", "passes"))
    awaited = passes * (1.0 - grown["overlapped"] / max(1.0, grown["received"]))
    return {"proposals": proposals, "passes": passes, "awaited": awaited, "guesses": grown["guesses"] / max(1.0, grown["verifications"])}


async def measure_empty(stub: _Stub, traffic: Traffic, num_rounds: int, drafting_ms: float) -> Segment:
    """A segment of the same traffic through empty handlers, which sleep `drafting_ms` in each round for the draft."""
    streams = await _read_streams(stub, [traffic.request() for _ in range(traffic.num_sequences)], num_rounds)
    pairs = [pair for stream in streams for pair in _pairs(stream)]
    sleeps = [output.accepted / 1e3 + drafting_ms for _, (_, output) in pairs]
    gaps = [1e3 * (later - earlier) - asleep for ((earlier, _), (later, _)), asleep in zip(pairs, sleeps, strict=True)]
    return _segment(gaps, traffic.num_pieces, traffic.num_guesses, traffic.num_tokens, traffic.num_pieces, traffic.num_pieces, fmean(sleeps))


_Stream = list[tuple[float, generate_pb2.Output]]


async def _read_streams(
    stub: _Stub, requests: Sequence[generate_pb2.GenerateRequest], num_rounds: int, on_warm: Callable[[], None] = lambda: None
) -> list[_Stream]:
    """Outputs of each stream with their times, until each has had its rounds; all streams stay open until then. `on_warm`: when the last is warm."""
    all_done, num_cold = asyncio.Barrier(len(requests)), len(requests)

    async def read(request: generate_pb2.GenerateRequest) -> _Stream:
        nonlocal num_cold
        outputs: _Stream = []
        call = stub.Generate(request)
        async for response in call:
            if response.HasField("output"):
                outputs.append((time.perf_counter(), response.output))
                num_cold -= len(outputs) == _WARM_UP
                if len(outputs) == _WARM_UP and not num_cold:
                    on_warm()
            if len(outputs) == _WARM_UP + num_rounds + 1:
                waiting = asyncio.create_task(all_done.wait())
                break
        else:
            raise RuntimeError("a stream has ended before its rounds were over")
        async for _ in call:  # keep reading: the others still run, and a step is to stay as large as it is
            if waiting.done():
                break
        call.cancel()
        return outputs

    return await asyncio.gather(*map(read, requests))


def _pairs(stream: _Stream) -> list[tuple[tuple[float, generate_pb2.Output], tuple[float, generate_pb2.Output]]]:
    return list(zip(stream[_WARM_UP:], stream[_WARM_UP + 1 :], strict=False))


def _segment(gaps_ms: Sequence[float], *means: float) -> Segment:
    return Segment(median(gaps_ms), quantiles(gaps_ms, n=10)[-1], *means)


def _request(index: int, k: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=[(31 * index + 7 * position) % _VOCAB for position in range(_PROMPT_TOKENS)]),
        sampling=generate_pb2.Sampling(temperature=0.0, seed=index + 1),
        stopping=generate_pb2.Stopping(ignore_eos=True),
        speculation=generate_pb2.Speculation(max_draft_tokens=k),
    )


async def _counters(pair: Pair) -> dict[str, float]:
    """What both services have counted by now; a round is a step that decodes."""
    of_verifier, of_draft = await asyncio.gather(scrape_text(pair.verifier.metrics), scrape_text(pair.draft.metrics))
    counted = read_samples(of_verifier)
    return {
        "rounds": counted["outrider_draft_wait_seconds_count"],
        "proposals": read_by_label(of_verifier, "outrider_link_messages_total", "kind")["proposals"],
        "received": counted["outrider_received_guesses_total"],
        "overlapped": counted["outrider_overlapped_guesses_total"],
        "guesses": counted["outrider_spec_decode_num_draft_tokens_total"],
        "verifications": counted["outrider_spec_decode_num_drafts_total"],
        "passes": read_samples(of_draft)["outrider_draft_step_seconds_count"],
    }


async def _run(arguments: argparse.Namespace) -> list[Result]:
    listen, link, *of_pair = (f"127.0.0.1:{port}" for port in free_ports(2 + len(_ADDRESSES)))
    pair = _plan(arguments, of_pair)
    empty = [_empty_child("verifier", listen, link), _empty_child("draft", link)]
    async with (
        Supervisor([*children(pair), *empty], line_writer(Console(stderr=True)), _GRACE_S) as supervisor,
        open_channel(pair.verifier.listen) as channel,
        open_channel(listen) as empty_channel,
    ):
        await supervisor.wait_until_ready()
        async with Client(pair.verifier.listen) as client:
            await wait_for_drafter(client)
        await asyncio.wait_for(empty_channel.channel_ready(), 30.0)
        stub, empty_stub = verifier_pb2_grpc.VerifierServiceStub(channel), verifier_pb2_grpc.VerifierServiceStub(empty_channel)
        return [await _compare(arguments, pair, stub, empty_stub, count) for count in arguments.sequences]


async def _compare(arguments: argparse.Namespace, pair: Pair, stub: _Stub, empty_stub: _Stub, count: int) -> Result:
    target_ms, draft_ms = sleep_ms(arguments.target_ms), sleep_ms(arguments.draft_ms)

    async def ours() -> Segment:
        return await measure_ours(stub, pair, count, arguments.k, arguments.rounds, target_ms, draft_ms)

    recorded = await ours()  # not counted: the pace is found, and the traffic recorded
    num_pieces, num_passes, num_tokens = (max(1, round(mean)) for mean in (recorded.num_pieces, recorded.num_passes, recorded.num_tokens))
    # The same time asleep, in as many parts as there are pieces; a pass is a guess for each sequence.
    draft_us, target_us = round(1e3 * arguments.draft_ms * recorded.num_awaited / num_pieces), round(1e3 * arguments.target_ms)
    traffic = Traffic(count, num_pieces, num_passes, num_tokens, draft_us, target_us)
    drafting_ms = num_pieces * sleep_ms(draft_us / 1e3)
    of_ours, of_empty = [], []
    for index in range(arguments.pairs):
        if index % 2 == 0:
            of_ours.append(await ours())
        of_empty.append(await measure_empty(empty_stub, traffic, arguments.rounds, drafting_ms))
        if index % 2 == 1:
            of_ours.append(await ours())
    return Result(count, tuple(of_ours), tuple(of_empty))


def _plan(arguments: argparse.Namespace, addresses: Sequence[str]) -> Pair:
    assignments = [f"{name}={address}" for name, address in zip(_ADDRESSES, addresses, strict=True)]
    simulation = f"simulate=target-ms={arguments.target_ms:g},draft-ms={arguments.draft_ms:g},acceptance={arguments.acceptance:g}"
    settings = [f"max-draft-tokens={arguments.k}", "log-level=warning", simulation]
    return plan(assignments=[*settings, *assignments, *arguments.set])


def _empty_child(role: str, *addresses: str) -> Child:
    async def is_ready() -> bool:
        return True  # its channels wait by themselves

    return Child(f"empty {role}", (sys.executable, "-m", "bench.empty", role, *addresses), dict(os.environ), is_ready)


def sleep_ms(asked_ms: float) -> float:
    """How long a sleep of so many milliseconds takes, median of some."""
    times = []
    for _ in range(_NUM_SLEEPS if asked_ms else 0):
        began = time.perf_counter()
        time.sleep(asked_ms / 1e3)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times) if times else 0.0


def summarise(results: Sequence[Result]) -> Table:
    """A row for each number of sequences."""
    caption = "taken off: a pass of the target, and the passes of the draft that were awaited, mean of a segment's rounds"
    table = Table(title="a round beyond the two forwards, medians over the segments", caption=caption)
    of_sides = ("sequences", "ours p50 ms", "p90", "empty handlers p50 ms", "p90", f"ratio of p50 {BOOTSTRAP}")
    for column in (*of_sides, "messages of guesses", "guesses", "tokens", "draft passes", "awaited"):
        table.add_column(column, justify="right")
    for result in results:
        ours, empty = result.ours, result.empty
        figures = [median(getattr(each, name) for each in side) for side in (ours, empty) for name in ("p50_ms", "p90_ms")]
        traffic = [median(getattr(each, name) for each in ours) for name in ("num_pieces", "num_guesses", "num_tokens", "num_passes", "num_awaited")]
        table.add_row(
            str(result.num_sequences), *(f"{figure:.2f}" for figure in figures), str(result.ratio), *(f"{number:.1f}" for number in traffic)
        )
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64], help="streams at once")
    parser.add_argument("--k", type=int, default=4, help="most guesses in a round")
    parser.add_argument("--target-ms", type=float, default=30.0, help="a pass of the target's stand-in")
    parser.add_argument("--draft-ms", type=float, default=2.0, help="a pass of the draft's stand-in")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance of each guess")
    parser.add_argument("--pairs", type=int, default=7, help="segments of each kind")
    parser.add_argument("--rounds", type=int, default=40, help="rounds in a segment")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="any other setting, as for `outrider up`")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    grpc.aio.init_grpc_aio()
    results = uvloop.run(until_terminated(_run(arguments)))
    Console().print(summarise(results))
    if arguments.json:
        record = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": platform.processor(), **vars(arguments)}
        Path(arguments.json).write_text(json.dumps({**record, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
