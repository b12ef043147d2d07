"""Plain numbers about the engine's work. `verifier_service.metrics` alone turns them into Prometheus series."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

# How a wait for guesses ended: enough came; some did, and the next was overdue; none did; others' work went first.
WaitOutcome = Literal["served", "overdue", "in_vain", "cut_short"]
WAIT_OUTCOMES: tuple[WaitOutcome, ...] = get_args(WaitOutcome)


@dataclass(slots=True)
class Decisions:
    """What was decided about guesses around one step.

    Args:
        allotted: per decoding sequence of the step the guesses that were scored.
        windows: per sequence with a drafter what it was granted after the step.
        acceptance_bounds: per decoding sequence with a drafter the lower bound of acceptance that it was decided by.
        predicted_seconds: what the step was expected to take; None while nothing is known.
        wait: how the wait before it ended and how long it took, in seconds; None if there was none.
    """

    allotted: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    acceptance_bounds: tuple[float, ...] = ()
    predicted_seconds: float | None = None
    wait: tuple[WaitOutcome, float] | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step.

    Args:
        seconds: the step from schedule to commit.
        waited_seconds: time spent waiting for guesses before it.
        decode_rows: rows of sequences that decode or verify, guesses included.
        prefill_tokens: prompt (or recomputed) tokens run.
        running: sequences that hold blocks after the step.
        waiting: requests that hold none yet.
        preempted: sequences preempted in this step.
        free_blocks: KV blocks free after the step, with nothing in them that may be of use.
        used_blocks: KV blocks held by sequences after the step.
        cached_blocks: KV blocks held by nobody after the step, whose content may be of use to requests that begin alike.
        queried_tokens: prompt tokens of requests that began to run in this step.
        cached_tokens: of those, the ones whose KV was there.
        queue_seconds: for each request that was scheduled for the first time: how long it had waited.
        decisions: about guesses.
    """

    seconds: float
    waited_seconds: float
    decode_rows: int
    prefill_tokens: int
    running: int
    waiting: int
    preempted: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: tuple[float, ...] = ()
    decisions: Decisions = field(default_factory=Decisions)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Args:
        scorer: the faster one for one sequence with all its guesses.
        scorer_seconds: what such a step took with each of those that were compared.
        points: seconds of a step by its tokens, with that scorer; empty if nothing could be measured.
    """

    scorer: Literal["expanded", "multi_query"]
    scorer_seconds: Mapping[str, float]
    points: Mapping[int, float]


@dataclass(slots=True)
class LinkCounters:
    """What became of one drafter's guesses and frames, counted since it attached. Reasons are a fixed, small set.

    Args:
        received: guesses that arrived.
        joined_while_computing: guesses that joined a buffer while a forward pass was running or before it was awaited.
        stale: guesses that fit nothing, by reason: `late`, `mismatch`, `gap`, `duplicate`, `unknown_sequence`, `over_window`.
        rejected: proposals refused at the boundary, by reason: `too_long`, `bad_shape`, `bad_probability`, `bad_frame`.
        dropped: guesses dropped from a buffer by a commit that contradicted them.
    """

    received: int = 0
    joined_while_computing: int = 0
    dropped: int = 0
    stale: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, other: "LinkCounters") -> None:
        """Adds another's counts to these."""
        self.received += other.received
        self.joined_while_computing += other.joined_while_computing
        self.dropped += other.dropped
        self.stale.update(other.stale)
        self.rejected.update(other.rejected)
