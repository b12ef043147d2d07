"""How many guesses a drafter is asked for, and how long a step waits for them: `wait_policy` fed with what is measured.

State of the engine thread. It knows sequences and drafters as counts and times, not their tokens.
"""

from dataclasses import dataclass

from verifier_service.drafters import Drafter, Drafters
from verifier_service.generation import Generation
from verifier_service.wait_policy import num_sequences_to_serve, num_worth_ahead, num_worth_in_lock_step, pays_to_wait

_DECAY = 0.2  # weight of a new sample in the running mean of a step's time
_SLACK = 0.5  # a guess is overdue by this share of the time it was given
_HOPEFUL_SLACK = 1.5  # the same where that time is a hopeful estimate, half of what was measured
_PROBE_EVERY = 64  # tokens: so often one guess is asked and waited for where none is worth it; at most 1.6% of the time


@dataclass(frozen=True, slots=True)
class _Wait:
    """Until when a sequence would wait for the drafter on a link, how fast that answers, and whether the sequence has no guess yet."""

    link: int
    until: float
    turnaround_s: float
    has_none: bool


class Pacing:
    """Windows and waits.

    Args:
        drafters: the attached ones.
        window: most tokens beyond the committed ones that a drafter may have sent.
        max_draft_tokens: most guesses scored for a sequence in a step.
    """

    def __init__(self, drafters: Drafters, window: int, max_draft_tokens: int) -> None:
        self._drafters = drafters
        self._window = window
        self._max_draft_tokens = max_draft_tokens
        self._step_s: float | None = None
        self._awaited: set[int] = set()

    def window(self, generation: Generation, drafter: Drafter) -> int:
        """The window that the sequence's drafter is granted from now on."""
        window = min(self._window, generation.room)
        if self._runs_ahead or self._step_s is None or drafter.timing.turnaround_s is None:
            return window
        return self._num_worth(generation, drafter, self._step_s, self._limit(generation))

    def committed(self, generation: Generation, drafter: Drafter, contradicted: bool, now: float) -> None:
        """Tokens were committed; `contradicted`: they were not those that the buffer had foreseen."""
        generation.committed_at = now
        if contradicted or not self._runs_ahead:  # the drafter cannot go on before it hears of this
            generation.expected_at = now + (drafter.timing.turnaround_s or 0.0)

    def guesses_came(self, generation: Generation, drafter: Drafter, num_joined: int, now: float, overlapped: bool) -> None:
        """Guesses came that agree with the text, though perhaps too late to be of use."""
        drafter.vain_waits = 0
        # What arrived during a step is looked at after its commit: the times decide whether a commit came between two pieces.
        if num_joined and generation.joined_at is not None and not generation.joined_at < generation.committed_at <= now:
            drafter.timing.gap.observe((now - generation.joined_at) / num_joined, self.is_disturbed(overlapped))
        generation.joined_at = now
        generation.expected_at = max(generation.expected_at, now + drafter.timing.gap_s)

    def is_disturbed(self, overlapped: bool) -> bool:
        """Whether what came while a step was computed was made on the cores of that step."""
        return overlapped and not self._runs_ahead

    def observe_decode_step(self, seconds: float) -> None:
        """Takes note of a step without prefill."""
        self._step_s = seconds if self._step_s is None else self._step_s + _DECAY * (seconds - self._step_s)

    def wait_until(self, decoding: list[Generation], num_others: int, since: float, now: float) -> float:
        """Time until which the next step had better wait for guesses.

        Args:
            decoding: the sequences whose next step is a decode.
            num_others: requests that prefill or wait; they are never made to wait longer.
            since: when the last step ended.
            now: a wait that would have been over by now is none.
        """
        awaited, self._awaited = self._awaited, set()
        step_s = self._step_s
        if step_s is None or num_others or not decoding:
            return since
        waits = [self._wait_of(generation, step_s, since, alone=len(decoding) == 1) for generation in decoding]
        if any(wait is None for wait in waits):
            return since  # a sequence that has nothing to wait for is not delayed
        unserved = [wait for wait in waits if wait is not None and wait.until > since]
        slowest_s = max((wait.turnaround_s for wait in unserved), default=0.0)
        if len(waits) - len(unserved) >= num_sequences_to_serve(len(waits), slowest_s, step_s, self._runs_ahead):
            return since
        until = min(since + step_s, max(wait.until for wait in unserved))
        self._awaited = {wait.link for wait in unserved if wait.has_none} if until > now else awaited
        return until

    def step_starts(self) -> None:
        """A step starts: drafters that it is still waiting for have let it wait in vain, whatever else they have sent."""
        for link in self._awaited:
            drafter = self._drafters.get(link)
            if drafter is not None:
                drafter.vain_waits += 1
        self._awaited = set()

    @property
    def _runs_ahead(self) -> bool:
        return self._window > self._max_draft_tokens

    def _limit(self, generation: Generation) -> int:
        return min(self._max_draft_tokens, generation.request.max_draft_tokens, generation.room)

    def _num_worth(self, generation: Generation, drafter: Drafter, step_s: float, limit: int) -> int:
        timing, rate = drafter.timing, generation.acceptance.rate
        if self._runs_ahead:
            return num_worth_ahead(rate, timing.gap_s, step_s, limit)
        worth = num_worth_in_lock_step(rate, timing.turnaround_s or 0.0, timing.gap_s, step_s, limit)
        return worth or int(limit > 0 and generation.num_generated % _PROBE_EVERY == 0)

    def _wait_of(self, generation: Generation, step_s: float, since: float, alone: bool) -> _Wait | None:
        """How long the sequence alone would wait; None if it has nothing to wait for, `since` if it is served."""
        drafter = self._drafters.get(generation.drafter)
        limit = self._limit(generation)
        if drafter is None or limit == 0 or drafter.timing.turnaround_s is None or drafter.suspended_until is not None:
            return None
        turnaround_s, gap_s = drafter.timing.turnaround_s, drafter.timing.gap_s
        pending, worth = len(generation.guesses), self._num_worth(generation, drafter, step_s, limit)
        served = _Wait(drafter.link, since, turnaround_s, has_none=False)
        if pending >= worth or drafter.idle or drafter.vain_waits:
            return served
        is_bare = self._runs_ahead and alone and not pending
        if is_bare and not pays_to_wait(generation.acceptance.rate, generation.expected_at - since, gap_s, step_s, worth, limit):
            return served
        slack = _SLACK if drafter.timing.turnaround.is_clean else _HOPEFUL_SLACK
        overdue = generation.expected_at + (worth - pending - 1) * gap_s + slack * (gap_s if pending else turnaround_s)
        return _Wait(drafter.link, overdue, turnaround_s, has_none=pending == 0)
