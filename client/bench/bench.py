"""A whole benchmark: for each round trip start the services, for each load measure a cell, with every arm in turn. It prints nothing itself."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from client.bench.cell import DRAFT, PLAIN, Arm, Cell, Endpoint, measure_cell
from client.bench.measure import Run
from client.bench.options import Options
from client.bench.plots import K_ARM
from client.bench.prompts import Prompts, read_prompts
from client.bench.services import Models, Station, started
from client.client import Client

OnRun = Callable[[str], None]

_PAIR = "the pair"
_RUN_AHEAD = "run-ahead"
_NO_DRAFTER = "no-drafter"


async def run_bench(options: Options, tell: OnRun) -> list[Cell]:
    """Measures every cell.

    Args:
        options: what to measure.
        tell: gets a line of progress now and then.

    Raises:
        OutriderError: nothing could be measured. Requests that fail are part of the figures.
    """
    texts = read_prompts(options.prompts, options.as_chat) if options.prompts else []
    cells: list[Cell] = []
    for models in options.models:
        where = "" if models.rtt_ms is None else f"RTT {models.rtt_ms:g} ms, "
        tell(f"{where}starting" if not options.address else f"connecting to {options.address}")
        async with _stations(options, models) as endpoints:
            vocab_size = (await endpoints[_PAIR].client.info()).model.vocab_size
            prompts = Prompts(texts, options.input_tokens, options.output_tokens, vocab_size, options.plan.seed)
            for load in options.loads:
                plan = options.plan_for(load)
                told = f"{where}{load}: "
                tell(f"{told}warming up")

                def on_run(pair: int, arm: str, run: Run, told: str = told, num_pairs: int = plan.num_pairs) -> None:
                    tell(f"{told}pair {pair + 1} of {num_pairs}, {arm}: {run.output_per_s:.1f} tok/s")

                cells.append(await measure_cell(_arms(options, endpoints), load, prompts, options.request, plan, models.rtt_ms, on_run))
    return cells


@asynccontextmanager
async def _stations(options: Options, models: Models) -> AsyncIterator[Mapping[str, Endpoint]]:
    if options.address:
        async with Client(options.address) as client:
            yield {_PAIR: Endpoint(client, options.metrics_address)}
        return
    # A request cannot ask for more guesses than the service scores.
    assignments = ((f"verifier.max-draft-tokens={max(options.k)}",) if any(options.k) else ()) + options.assignments
    stations = [Station(_PAIR, assignments)]
    if options.run_ahead is not None:
        stations.append(Station(_RUN_AHEAD, assignments, run_ahead=options.run_ahead))
    if options.alone:
        stations.append(Station(_NO_DRAFTER, assignments, has_drafter=False))
    async with started(stations, models) as endpoints:
        yield endpoints


def _arms(options: Options, endpoints: Mapping[str, Endpoint]) -> Sequence[Arm]:
    """Plain decoding first: everything is compared with it."""
    pair = endpoints[_PAIR]
    arms = [Arm(PLAIN, pair, 0, ())]
    others: tuple[str, ...] = ()
    if _NO_DRAFTER in endpoints:
        arms.append(Arm(_NO_DRAFTER, endpoints[_NO_DRAFTER], None, ()))
        others += (_NO_DRAFTER,)
        arms[0] = Arm(PLAIN, pair, 0, others)
    if _RUN_AHEAD in endpoints:
        name = f"{_RUN_AHEAD}={options.run_ahead}"
        arms.append(Arm(name, endpoints[_RUN_AHEAD], None))
        arms.append(Arm(DRAFT, pair, None, (PLAIN, *others, name)))
    elif not options.k:
        arms.append(Arm(DRAFT, pair, None, (PLAIN, *others)))
    return arms + [Arm(f"{K_ARM}{k}", pair, k, (PLAIN, *others)) for k in options.k if k]


def write_json(path: Path, text: str) -> None:
    """Writes a file whose directory may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
