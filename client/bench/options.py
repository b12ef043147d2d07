"""What `outrider bench` is told, checked. It starts and measures nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from client.bench.cell import Load, Plan, Request
from client.bench.prompts import Lengths
from client.bench.services import Models
from shared.errors import OutriderError
from shared.simulation import parse, split

RTT = "rtt-ms"


class BadOptions(OutriderError):
    """Options that contradict each other or make no sense; the text says which."""

    reason = "BAD_OPTIONS"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a benchmark is told.

    Args:
        address: of a verifier that runs already; empty: services are started.
        metrics_address: of its metrics; empty: no counters.
        models: what started services run, one entry per cell of the round trip.
        assignments: settings of started services.
        loads: how requests come, one cell each.
        request: what requests have in common.
        plan: how much is measured; 0 requests or warm-ups: by load.
        prompts: file of prompts; None: made up.
        as_chat: lines of text become users' messages.
        input_tokens: lengths of made-up prompts.
        output_tokens: tokens to generate.
        k: an arm for each, with so many guesses at most.
        run_ahead: an arm of its own pair, whose drafter may be so many rounds ahead; None: no such arm.
        alone: an arm of a verifier of its own without a drafter.
    """

    address: str
    metrics_address: str
    models: tuple[Models, ...]
    assignments: tuple[str, ...]
    loads: tuple[Load, ...]
    request: Request
    plan: Plan
    prompts: Path | None
    as_chat: bool
    input_tokens: Lengths
    output_tokens: Lengths
    k: tuple[int, ...]
    run_ahead: int | None
    alone: bool

    def __post_init__(self) -> None:
        """Refuses what cannot be done.

        Raises:
            BadOptions: see there.
        """
        started = any(model.target or model.draft or model.simulate for model in self.models) or bool(self.assignments)
        if self.address and (started or self.run_ahead is not None or self.alone):
            raise BadOptions("with --address nothing is started: --target, --draft, --set, --simulate, --run-ahead and --no-drafter have no place")
        if self.metrics_address and not self.address:
            raise BadOptions("--metrics-address belongs to --address; services that are started here have theirs")
        if any(model.simulate and (model.target or model.draft) for model in self.models):
            raise BadOptions("--simulate stands in for both models: --target and --draft have no place beside it")

    def plan_for(self, load: Load) -> Plan:
        """The plan with what was left open filled in: a run is two rounds of a closed loop, and eight requests at least."""
        num_requests = self.plan.num_requests or (max(8, 2 * load.concurrency) if load.concurrency else 32)
        return Plan(num_requests, self.plan.num_pairs, min(self.plan.num_warmups or max(2, load.concurrency), num_requests), self.plan.seed)


def to_loads(concurrency: Sequence[str], rate: Sequence[str], burstiness: float) -> tuple[Load, ...]:
    """Loads out of flags; without any, one request at a time.

    Raises:
        BadOptions: both kinds, or a value that is none.
    """
    if concurrency and rate:
        raise BadOptions("--concurrency is a closed loop, --rate an open one: choose one")
    if burstiness <= 0:
        raise BadOptions("--burstiness must be above 0")
    if rate:
        return tuple(Load(rate=value, burstiness=burstiness) for value in numbers("--rate", rate, 1e-6))
    return tuple(Load(concurrency=value) for value in whole_numbers("--concurrency", concurrency or ("1",), 1))


def to_models(target: str | None, draft: str | None, simulate: str | None) -> tuple[Models, ...]:
    """What to run, once for each round trip in `rtt-ms=1:10:20` of a simulation.

    Raises:
        BadOptions: the simulation cannot be read.
    """
    if not simulate:
        return (Models(target, draft, "", None),)
    try:
        parts = dict(split(simulate))
        rtts = [float(rtt) for rtt in parts.pop(RTT).split(":")] if RTT in parts else [None]
        if any(rtt is not None and not 0 <= rtt <= 60_000 for rtt in rtts):
            raise ValueError(f"{RTT} must be milliseconds from 0 on, more of them with a colon between")
        rest = ",".join(f"{name}={value}" for name, value in parts.items()) or "acceptance=0.8"
        parse(rest)
    except ValueError as error:
        raise BadOptions(f"--simulate: {error}") from None
    return tuple(Models(target, draft, rest, rtt) for rtt in rtts)


def to_lengths(flag: str, text: str) -> Lengths:
    """A distribution of lengths out of a flag.

    Raises:
        BadOptions: it cannot be read.
    """
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise BadOptions(f"{flag} {error}") from None


def numbers(flag: str, texts: Sequence[str], least: float) -> list[float]:
    """`1,2 4` and the like.

    Raises:
        BadOptions: one of them is no number, or below `least`.
    """
    try:
        values = [float(word) for text in texts for word in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or not all(value >= least for value in values):
        raise BadOptions(f"{flag} takes numbers from {least:g} on, as in {flag} 1 2 4; it is {' '.join(texts)!r}")
    return values


def whole_numbers(flag: str, texts: Sequence[str], least: int) -> list[int]:
    """The same, whole.

    Raises:
        BadOptions: as above, or one is not whole.
    """
    values = numbers(flag, texts, least)
    if not all(value.is_integer() for value in values):
        raise BadOptions(f"{flag} takes whole numbers; it is {' '.join(texts)!r}")
    return [int(value) for value in values]
