"""One run of a load against one service: the figures that follow from its samples and from the counters before and after. It starts nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from client.bench.load import Outcome, Sample
from client.scrape import read_by_label, read_samples, scrape_text
from shared.errors import OutriderError

_PREFIX = "outrider_spec_decode_num_"


@dataclass(frozen=True, slots=True)
class Drafts:
    """What speculation did.

    Args:
        rounds: verifications with at least one guess.
        drafted: guesses scored.
        accepted: of those, the accepted ones.
        drafted_at: guesses scored by position in the round; empty if no counters could be read.
        accepted_at: of those, the accepted ones.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Run:
    """One load against one service. Seconds, and tokens or requests per second.

    Args:
        duration_s: from the start to the end of the last request.
        requests_per_s: of those that ended as they should.
        output_per_s: tokens that came, over the duration.
        total_per_s: the same with the prompts' tokens.
        steady_per_s: tokens per second while all places of a closed loop produced tokens; None in an open loop, or if there was no such time.
        ttft_s: per request, from its intended start to its first token.
        tpot_s: per request with two outputs at least, the time between its first and last output over the tokens after the first output.
        gap_s: per output after a request's first one, the time since the one before.
        e2e_s: per request, from its intended start to its end.
        send_lag_s: how late the latest request was sent: the load's own fault.
        drafts: what speculation did, by the service's counters, or by its answers where there are none.
        errors: failed requests by reason.
        texts: tokens of each request, in their order; empty where it failed.
        prompt_ids: prompts of each request as the service understood them.
    """

    duration_s: float
    requests_per_s: float
    output_per_s: float
    total_per_s: float
    steady_per_s: float | None
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    gap_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    send_lag_s: float
    drafts: Drafts
    errors: Mapping[str, int]
    texts: tuple[tuple[int, ...], ...]
    prompt_ids: tuple[tuple[int, ...], ...]


def to_run(outcome: Outcome, drafts: Drafts | None = None) -> Run:
    """The figures of a load.

    Args:
        outcome: of the load.
        drafts: by counters; None: by the answers.
    """
    good = [sample for sample in outcome.samples if not sample.error]
    duration_s = outcome.ended_at - outcome.began_at
    num_output = sum(sample.num_tokens for sample in outcome.samples)
    num_prompt = sum(len(sample.prompt_ids) for sample in good)
    return Run(
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s,
        output_per_s=num_output / duration_s,
        total_per_s=(num_output + num_prompt) / duration_s,
        steady_per_s=_steady(outcome),
        ttft_s=tuple(sample.outputs[0][0] - sample.intended_at for sample in good if sample.outputs),
        tpot_s=tuple(tpot for sample in good if (tpot := _tpot(sample)) is not None),
        gap_s=tuple(later - earlier for sample in good for (earlier, _), (later, _) in zip(sample.outputs, sample.outputs[1:], strict=False)),
        e2e_s=tuple(sample.ended_at - sample.intended_at for sample in good),
        send_lag_s=max((sample.sent_at - sample.intended_at for sample in outcome.samples), default=0.0),
        drafts=drafts or Drafts(*(sum(getattr(sample, name) for sample in good) for name in ("rounds", "drafted", "accepted"))),
        errors=dict(Counter(sample.error for sample in outcome.samples if sample.error)),
        texts=tuple(() if sample.error else sample.token_ids for sample in outcome.samples),
        prompt_ids=tuple(sample.prompt_ids for sample in outcome.samples),
    )


async def read_drafts(metrics_address: str) -> Drafts:
    """A verifier's counters of speculation, as they stand.

    Raises:
        OutriderError: there are no metrics at that address, or not a verifier's.
    """
    try:
        text = await scrape_text(metrics_address)
    except OSError as error:
        raise OutriderError(f"no metrics at {metrics_address}: {error}") from error
    counters = read_samples(text)
    if f"{_PREFIX}drafts_total" not in counters:
        raise OutriderError(f"the metrics at {metrics_address} are not a verifier's")
    rounds, drafted, accepted = (int(counters[f"{_PREFIX}{name}_total"]) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return Drafts(rounds, drafted, accepted, _by_position(text, "draft_tokens"), _by_position(text, "accepted_tokens"))


def between(before: Drafts, after: Drafts) -> Drafts:
    """What the counters grew by."""
    return Drafts(
        after.rounds - before.rounds,
        after.drafted - before.drafted,
        after.accepted - before.accepted,
        tuple(late - early for early, late in zip(before.drafted_at, after.drafted_at, strict=True)),
        tuple(late - early for early, late in zip(before.accepted_at, after.accepted_at, strict=True)),
    )


def add_up(drafts: Sequence[Drafts]) -> Drafts:
    """The sum of several runs' counters."""
    return Drafts(
        rounds=sum(each.rounds for each in drafts),
        drafted=sum(each.drafted for each in drafts),
        accepted=sum(each.accepted for each in drafts),
        drafted_at=tuple(map(sum, zip(*(each.drafted_at for each in drafts), strict=True))),
        accepted_at=tuple(map(sum, zip(*(each.accepted_at for each in drafts), strict=True))),
    )


def _by_position(text: str, name: str) -> tuple[int, ...]:
    by_position = read_by_label(text, f"{_PREFIX}{name}_per_pos_total", "position")
    return tuple(int(by_position[str(position)]) for position in range(len(by_position)))


def _tpot(sample: Sample) -> float | None:
    """What came with the first output has no time of its own."""
    if len(sample.outputs) < 2:
        return None
    num_later = sum(count for _, count in sample.outputs[1:])
    return (sample.outputs[-1][0] - sample.outputs[0][0]) / num_later


def _steady(outcome: Outcome) -> float | None:
    if outcome.whole is None or outcome.whole[1] <= outcome.whole[0]:
        return None
    start, end = outcome.whole
    num_tokens = sum(count for sample in outcome.samples for at, count in sample.outputs if start < at <= end)
    return num_tokens / (end - start)
