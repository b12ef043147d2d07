"""The attached draft services: which sequences each drafts for, what it is to be told, how fast it answers.

State of the engine thread. It knows sequence numbers and link values, not tensors, tokens' meaning or gRPC.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.link import Begin, Commit, End, Hello, StepBatch
from shared.sampling import Mode
from verifier_service.acceptance import Acceptance
from verifier_service.stats import LinkCounters

_DECAY = 0.2  # weight of a new sample in the running means
_MAX_VAIN_WAITS = 3
_MAX_TOLD = 256  # unanswered steps that are remembered to measure the turnaround
_HANG_S = 5.0  # no answer to a step for this long: the circuit opens even if nobody waited. A draft step of a long catch-up is shorter.
_FIRST_PROBE_S = 1.0
_MAX_PROBE_S = 60.0


@dataclass(slots=True)
class Pace:
    """A running mean of times, in seconds, of which some are disturbed: the verifier used the same cores meanwhile, or a new text had to be read.

    Disturbed ones count for half, and only until there is an undisturbed one: a hopeful estimate is put to the test, a gloomy one never would be.

    Args:
        mean_s: the mean; None until something was measured.
        is_clean: it is made of undisturbed samples.
    """

    mean_s: float | None = None
    is_clean: bool = False

    def observe(self, seconds: float, is_disturbed: bool) -> None:
        """Takes a sample."""
        if is_disturbed and self.is_clean:
            return
        sample = 0.5 * seconds if is_disturbed else seconds
        starts_over = self.mean_s is None or self.is_clean is is_disturbed
        self.mean_s = sample if self.mean_s is None or starts_over else self.mean_s + _DECAY * (sample - self.mean_s)
        self.is_clean = not is_disturbed


@dataclass(slots=True)
class Timing:
    """How fast a drafter answers.

    Args:
        turnaround: from telling a step to the first guesses that know it, right or wrong.
        gap: between two guesses of a sequence.
        told_s: what a guess takes, as the drafter says: stands for the gap until that is measured.
    """

    turnaround: Pace = field(default_factory=Pace)
    gap: Pace = field(default_factory=Pace)
    told_s: float | None = None

    @property
    def turnaround_s(self) -> float | None:
        """Mean turnaround; None until something was measured."""
        return self.turnaround.mean_s

    @property
    def gap_s(self) -> float:
        """Mean gap; until it is measured what the drafter says, but at most half the turnaround."""
        if self.gap.mean_s is not None:
            return self.gap.mean_s
        at_most_s = 0.5 * (self.turnaround.mean_s or 0.0)
        return at_most_s if self.told_s is None else min(self.told_s, at_most_s)


@dataclass(slots=True)
class Drafter:
    """One attached draft service.

    Args:
        link: number of its stream, never reused.
        hello: how it introduced itself.
        capacity: sequences it can serve; may change at any time.
        sequences: those it serves.
        told: steps it was told about and has not answered yet, with the times and whether new sequences were among it; the newest of them.
        owing_since: when the oldest of those was told, if there is one.
        idle: it has said that nothing more follows until the next step.
        vain_waits: waits in a row that brought no guess that fits.
        suspended_until: set while its circuit is open: when one sequence may be tried again.
        acceptance: of its guesses, over all sequences: what a new sequence is expected to do.
        begins: what it is to be told of sequences, by number, once the step ends; likewise `commits` and `ends`.
        unasked: sequences of which it is to guess nothing, and knows it. Their commits are kept back until that changes: telling it would only take
            time from both sides.
    """

    link: int
    hello: Hello
    capacity: int
    sequences: set[int] = field(default_factory=set)
    told: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=_MAX_TOLD))
    owing_since: float | None = None
    idle: bool = False
    vain_waits: int = 0
    suspended_until: float | None = None
    probe_s: float = _FIRST_PROBE_S
    timing: Timing = field(default_factory=Timing)
    acceptance: Acceptance = field(default_factory=Acceptance)
    counters: LinkCounters = field(default_factory=LinkCounters)
    begins: dict[int, Begin] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    unasked: set[int] = field(default_factory=set)

    @property
    def has_news(self) -> bool:
        """Whether it is to be told something now."""
        return bool(self.begins or self.ends) or any(map(self._is_due, self.commits.values()))

    @property
    def free(self) -> int:
        """Sequences it could take on."""
        return self.capacity - len(self.sequences)

    @property
    def owes_answer(self) -> bool:
        """Whether it was told something that it has not answered."""
        return self.owing_since is not None

    def take_batch(self, step: int, now: float) -> StepBatch | None:
        """What it is to be told of this step; None if nothing."""
        if not self.has_news:
            return None
        due = tuple(filter(self._is_due, self.commits.values()))
        batch = StepBatch(step, tuple(self.begins.values()), due, tuple(self.ends.values()))
        self.begins, self.ends = {}, {}
        for commit in due:
            del self.commits[commit.sequence]
        windows = {begin.sequence: begin.window for begin in batch.begins} | {commit.sequence: commit.window for commit in due}
        self.unasked -= windows.keys() | {end.sequence for end in batch.ends}
        self.unasked |= {number for number, window in windows.items() if window == 0}
        if batch.begins or batch.commits:  # an end alone asks for no answer
            self.told.append((step, now, bool(batch.begins)))
            if self.owing_since is None:
                self.owing_since = now
            self.idle = False
        return batch

    def _is_due(self, commit: Commit) -> bool:
        return commit.window > 0 or commit.rewind or commit.sequence not in self.unasked

    def answer(self, step: int, idle: bool, has_guesses: bool, now: float, is_disturbed: bool = False) -> None:
        """Takes note of an answer that knows `step`; one that was never told counts for the last that was.

        Args:
            step: last step that went into it.
            idle: nothing more follows until the next one.
            has_guesses: an empty answer tells nothing about the time that a guess takes.
            now: when it came.
            is_disturbed: it was made beside a step of the verifier, on the same cores.
        """
        told_at, has_caught_up = None, False
        while self.told and self.told[0][0] <= step:
            _, told_at, is_new = self.told.popleft()
            has_caught_up |= is_new
        if told_at is not None and has_guesses:
            # Whoever reads a prompt first is not slow for that.
            self.timing.turnaround.observe(now - told_at, is_disturbed or has_caught_up)
        self.owing_since = self.told[0][1] if self.told else None
        if not self.owes_answer:
            self.idle = idle
            self.suspended_until, self.probe_s = None, _FIRST_PROBE_S

    def is_hung(self, now: float) -> bool:
        """Whether it owes an answer for too long, or owes one and has let the verifier wait in vain too often."""
        return self.owing_since is not None and (self.vain_waits >= _MAX_VAIN_WAITS or now - self.owing_since > _HANG_S)


class Drafters:
    """All attached draft services, and who drafts for which sequence."""

    def __init__(self) -> None:
        self._by_link: dict[int, Drafter] = {}

    def __iter__(self) -> Iterator[Drafter]:
        """In the order they attached."""
        return iter(list(self._by_link.values()))

    def get(self, link: int | None) -> Drafter | None:
        """The one on this link, if it is still attached."""
        return self._by_link.get(link) if link is not None else None

    def attach(self, link: int, hello: Hello) -> Drafter:
        """Adds one."""
        drafter = Drafter(link, hello, hello.capacity)
        self._by_link[link] = drafter
        return drafter

    def detach(self, link: int) -> Drafter | None:
        """Removes one; its sequences are its caller's to hand over."""
        return self._by_link.pop(link, None)

    def choose(self, mode: Mode, preferred: str | None, declined: set[int], now: float) -> Drafter | None:
        """The drafter for a sequence: the preferred one if it has room, else the one with most room."""
        able = [d for d in self._by_link.values() if d.free > 0 and mode in d.hello.modes and d.link not in declined and self._may_try(d, now)]
        wanted = [d for d in able if preferred in (d.hello.instance_id, d.hello.name)]
        return max(wanted or able, key=lambda drafter: drafter.free, default=None)

    def suspend_hung(self, now: float) -> list[Drafter]:
        """Opens the circuit of those that do not answer; their sequences are the caller's to hand over."""
        hung = [d for d in self._by_link.values() if d.is_hung(now) and (d.suspended_until is None or d.sequences)]
        for drafter in hung:
            drafter.suspended_until = now + drafter.probe_s
            drafter.probe_s = min(2 * drafter.probe_s, _MAX_PROBE_S)
            drafter.vain_waits = 0
        return hung

    @staticmethod
    def _may_try(drafter: Drafter, now: float) -> bool:
        # Half open: one sequence at a time finds out whether it answers again.
        if drafter.suspended_until is None:
            return True
        return now >= drafter.suspended_until and not drafter.sequences
