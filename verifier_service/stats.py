"""Plain numbers about the engine's work. `verifier_service.metrics` alone turns them into Prometheus series."""

from collections import Counter
from dataclasses import dataclass, field


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
        free_blocks: KV blocks free after the step.
        used_blocks: KV blocks held by sequences after the step.
        queue_seconds: for each request that was scheduled for the first time: how long it had waited.
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
    queue_seconds: tuple[float, ...] = ()


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
