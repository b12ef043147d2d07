"""From runs to figures: percentiles, what an arm did over all its runs, how two arms compare, and whether they said the same."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median

from client.bench.measure import Drafts, Run, add_up
from client.bench.ratio import Ratio, paired_ratio


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours as numpy has it.

    Args:
        values: one at least, in any order.
        percent: 0 to 100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of times in seconds, over all requests (or outputs) of all runs."""

    mean: float
    median: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are no values."""
        return cls(mean(values), median(values), percentile(values, 90), percentile(values, 99), len(values)) if values else None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What an arm did over its runs: rates are medians over runs, times are over all requests of all runs.

    Args:
        requests_per_s: that ended as they should.
        output_per_s: tokens that came.
        total_per_s: prompts included.
        steady_per_s: output tokens while all places were busy; None where no run has it.
        ttft: time to first token.
        tpot: time per token after the first output.
        gap: time between outputs.
        e2e: whole requests.
        send_lag_s: the latest that any request was sent.
        drafts: over all runs.
        errors: failed requests by reason.
    """

    requests_per_s: float
    output_per_s: float
    total_per_s: float
    steady_per_s: float | None
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    e2e: Spread | None
    send_lag_s: float
    drafts: Drafts
    errors: Mapping[str, int]


def summarise(runs: Sequence[Run]) -> ArmSummary:
    """One arm's runs, together."""
    steady = [run.steady_per_s for run in runs if run.steady_per_s is not None]
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.errors)

    def spread(pick: Callable[[Run], Sequence[float]]) -> Spread | None:
        return Spread.of(list(chain.from_iterable(pick(run) for run in runs)))

    return ArmSummary(
        requests_per_s=median(run.requests_per_s for run in runs),
        output_per_s=median(run.output_per_s for run in runs),
        total_per_s=median(run.total_per_s for run in runs),
        steady_per_s=median(steady) if steady else None,
        ttft=spread(lambda run: run.ttft_s),
        tpot=spread(lambda run: run.tpot_s),
        gap=spread(lambda run: run.gap_s),
        e2e=spread(lambda run: run.e2e_s),
        send_lag_s=max(run.send_lag_s for run in runs),
        drafts=add_up([run.drafts for run in runs]),
        errors=dict(errors),
    )


# What is compared: larger is better in all of them, so that a ratio above 1 means that the first arm is the better one.
MERITS: Mapping[str, Callable[[Run], float | None]] = {
    "steady_per_s": lambda run: run.steady_per_s,
    "output_per_s": lambda run: run.output_per_s,
    "inverse_tpot": lambda run: 1 / mean(run.tpot_s) if run.tpot_s and min(run.tpot_s) > 0 else None,
    "inverse_e2e": lambda run: 1 / mean(run.e2e_s) if run.e2e_s else None,
    "inverse_ttft": lambda run: 1 / mean(run.ttft_s) if run.ttft_s else None,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms, pair by pair.

    Args:
        arm: the first.
        against: the second.
        ratios: of the first to the second by merit; a merit that a run of either has not is left out.
        num_texts: pairs of texts that were compared; a failed request has none.
        num_same: of those, the identical ones.
        first_differences: index of the first token that is not the same, of each pair that differs.
        num_compared_tokens: tokens up to and including the first difference, of all pairs.
    """

    arm: str
    against: str
    ratios: Mapping[str, Ratio]
    num_texts: int
    num_same: int
    first_differences: tuple[int, ...]
    num_compared_tokens: int

    def speedup(self) -> Ratio | None:
        """The ratio that says it best: of tokens per second with all places busy, or of time per token where the load is a schedule."""
        return next((self.ratios[merit] for merit in ("steady_per_s", "inverse_tpot", "output_per_s") if merit in self.ratios), None)


def compare(arm: str, runs: Sequence[Run], against: str, other_runs: Sequence[Run]) -> Comparison:
    """Compares runs that were made in pairs: the same requests, one right after the other."""
    ratios: dict[str, Ratio] = {}
    for merit, of in MERITS.items():
        numerators, denominators = ([value for run in side if (value := of(run))] for side in (runs, other_runs))
        if len(numerators) == len(denominators) == len(runs):
            ratios[merit] = paired_ratio(numerators, denominators)
    texts = [
        (left, right)
        for run, other in zip(runs, other_runs, strict=True)
        for left, right in zip(run.texts, other.texts, strict=True)
        if left and right
    ]
    differences = [first_difference(left, right) for left, right in texts]
    found = tuple(at for at in differences if at is not None)
    num_compared = sum(len(left) if at is None else at + 1 for (left, _), at in zip(texts, differences, strict=True))
    return Comparison(arm, against, ratios, len(texts), len(texts) - len(found), found, num_compared)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that is not the same, the end of the shorter text included; None if they are equal."""
    same = next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return None if same == len(left) == len(right) else same
