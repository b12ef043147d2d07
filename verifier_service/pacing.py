"""How many guesses a drafter is granted, how many of them a step scores, and how long it waits for them: the policies fed with what is measured.

State of the engine thread. It knows sequences and drafters as counts and times, not their tokens: in rejection mode a decision that depended on
a guess would bias the output, so nothing here reads one. Acceptance is of committed rounds, up to each round's first rejection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier_service.drafters import Drafter, Drafters
from verifier_service.exploration import Exploration
from verifier_service.generation import Generation
from verifier_service.guess_budget import allot, num_worth
from verifier_service.scheduler import deal_evenly
from verifier_service.stats import Decisions, WaitOutcome
from verifier_service.step_cost import StepCost
from verifier_service.wait_policy import ENOUGH_WHEN_GATHERED, MAX_GATHERED, gathering, num_worth_ahead, pays_to_wait, worth_of_next
from verifier_service.windows import DEVIATIONS, Windows, idle_by_turn

_SLACK = 0.5  # a guess is overdue by this share of the time it was given
_HOPEFUL_SLACK = 1.5  # the same where that time is a hopeful estimate, half of what was measured
_SLOPE_ROWS = 8  # the cost of a token more is taken over so many


@dataclass(frozen=True, slots=True)
class _Wait:
    """Until when a sequence would wait for the drafter on a link, how fast that answers, and whether the sequence has no guess yet."""

    link: int
    until: float
    turnaround_s: float
    has_none: bool


class Pacing:
    """Windows, guesses to score, and waits.

    Args:
        drafters: the attached ones.
        window: most tokens beyond the committed ones that a drafter may have sent.
        max_draft_tokens: most guesses scored for a sequence in a step.
        cost: of a step; refined here by every step.
    """

    def __init__(self, drafters: Drafters, window: int, max_draft_tokens: int, cost: StepCost) -> None:
        self._drafters = drafters
        self.runs_ahead = window > max_draft_tokens
        self._max_draft_tokens = max_draft_tokens
        self._cost = cost
        self._exploration = Exploration()
        self._windows = Windows(drafters, window, max_draft_tokens, cost, self._exploration)
        self._num_steps = 0
        self._rate = 0.0  # expected tokens per second of the last step
        self._num_rows = 1  # of the last step without its guesses
        self._awaited: set[int] = set()
        self._waits_since: float | None = None
        self._may_wait_until = 0.0
        self._is_served = False
        self._decisions = Decisions()

    @property
    def cost(self) -> StepCost:
        """What a step is thought to cost."""
        return self._cost

    # -- windows

    def first_window(self, generation: Generation, drafter: Drafter) -> int:
        """The window of a sequence that a drafter is told of anew."""
        return self._windows.first_window(generation, drafter)

    def grant(self, decoding: Sequence[Generation]) -> None:
        """Decides the windows of all sequences that decode next, once a step is committed; each is then its `granted`."""
        least_worth = self._least_worth() if self._cost.is_known else 0.0
        self._decisions.windows = self._windows.grant(decoding, self._num_rows, least_worth)

    # -- guesses

    def allot(self, decoding: Sequence[Generation], budget: int, num_planned: int) -> Sequence[int]:
        """Decides how many guesses of each sequence the step scores. See `scheduler.Allot`."""
        limits = [min(generation.num_usable, self._max_draft_tokens) for generation in decoding]
        self._num_rows = max(1, num_planned)
        if not self._cost.is_known or not decoding:
            counts = deal_evenly(decoding, budget, num_planned)
            self._decisions.allotted = tuple(counts)
            return counts
        bounds = [self._lower(generation) for generation in decoding]
        best = allot(bounds, limits, self._cost.seconds_of, self._num_rows, budget)
        counts = list(best.counts)
        self._rate = best.rate
        for index in self._probed(decoding, limits, counts, budget - sum(counts)):
            counts[index] = 1
        self._decisions.allotted = tuple(counts)
        self._decisions.acceptance_bounds = tuple(bound for bound, generation in zip(bounds, decoding, strict=True) if generation.drafter is not None)
        return counts

    # -- waits

    def committed(self, generation: Generation, drafter: Drafter, contradicted: bool, now: float) -> None:
        """Tokens were committed; `contradicted`: they were not those that the buffer had foreseen."""
        generation.committed_at = now
        if contradicted or not self.runs_ahead:  # the drafter cannot go on before it hears of this
            generation.expected_at = now + (drafter.timing.turnaround_s or 0.0)

    def guesses_came(self, generation: Generation, drafter: Drafter, num_joined: int, now: float, overlapped: bool) -> None:
        """Guesses came that agree with the text, though perhaps too late to be of use."""
        drafter.vain_waits = 0
        # What arrived during a step is looked at after its commit: the times decide whether a commit came between two pieces.
        if num_joined and generation.joined_at is not None and not generation.joined_at < generation.committed_at <= now:
            drafter.timing.gap.observe((now - generation.joined_at) / num_joined, self.is_disturbed(overlapped))
        generation.joined_at = now
        generation.expected_at = max(generation.expected_at, now + drafter.timing.gap_s)

    def guesses_missed(self, generation: Generation, drafter: Drafter) -> None:
        """Guesses came that contradict the text: their drafter starts over once it hears of the commit that says otherwise."""
        if self.runs_ahead:
            generation.expected_at = max(generation.expected_at, generation.committed_at + (drafter.timing.turnaround_s or 0.0))

    def is_disturbed(self, overlapped: bool) -> bool:
        """Whether what came while a step was computed was made on the cores of that step."""
        return overlapped and not self.runs_ahead

    def wait_until(self, decoding: list[Generation], num_others: int, since: float, now: float) -> float:
        """Time until which the next step had better wait for guesses.

        Args:
            decoding: the sequences whose next step is a decode.
            num_others: requests that prefill or wait; they are never made to wait longer.
            since: when the last step ended.
            now: a wait that would have been over by now is none.
        """
        until, awaited = self._until(decoding, since) if self._cost.is_known and decoding and not num_others else (since, set())
        if until > now:
            self._waits_since, self._may_wait_until, self._awaited = since, until, awaited
        self._is_served = until <= now and not num_others
        return until

    def step_starts(self, now: float) -> None:
        """A step starts: drafters that it is still waiting for have let it wait in vain, whatever else they have sent."""
        if self._waits_since is not None:
            outcome: WaitOutcome
            if now < self._may_wait_until:  # it ends before its time
                outcome = "served" if self._is_served else "cut_short"
            else:
                outcome = "in_vain" if self._awaited else "overdue"
                for drafter in filter(None, map(self._drafters.get, self._awaited)):
                    drafter.vain_waits += 1
            self._decisions.wait = (outcome, max(0.0, now - self._waits_since))
        self._awaited, self._waits_since, self._may_wait_until = set(), None, 0.0

    def step_ended(self, num_rows: int, num_prefill: int, seconds: float) -> None:
        """Takes note of a step: its tokens, those of them that are of prompts, and what it took."""
        self._exploration.earn(seconds)
        self._num_steps += 1
        if not num_rows:
            return
        if self._cost.is_known:
            self._decisions.predicted_seconds = self._cost.seconds(num_rows)
        if not num_prefill:  # a prompt's tokens cost more by attention and less by logits than those of other steps
            self._cost.observe(num_rows, seconds)

    def take_decisions(self) -> Decisions:
        """What was decided since this was last asked."""
        decisions, self._decisions = self._decisions, Decisions()
        return decisions

    def _lower(self, generation: Generation) -> float:
        return generation.acceptance.bound(-DEVIATIONS)

    def _least_worth(self) -> float:
        """The chance of acceptance below which a guess costs the batch more than it gives."""
        rows = np.array([self._num_rows, self._num_rows + _SLOPE_ROWS])
        low, high = self._cost.seconds_of(rows)
        return float(high - low) / _SLOPE_ROWS * self._rate

    def _probed(self, decoding: Sequence[Generation], limits: Sequence[int], counts: Sequence[int], most: int) -> list[int]:
        """At most `most` sequences whose guesses do not pay and are tried all the same, the one least lately tried first."""
        row_s = self._cost.seconds(self._num_rows + sum(counts) + 1) - self._cost.seconds(self._num_rows + sum(counts))
        probed = self._exploration.choose(idle_by_turn(decoding, limits, counts)[: max(0, most)], row_s)
        for index, generation in enumerate(decoding):
            if counts[index] or index in probed:
                generation.tried_at = self._num_steps
        return probed

    def _until(self, decoding: list[Generation], since: float) -> tuple[float, set[int]]:
        """When the next step had better start, and the links whose first guess it waits for."""
        if self.runs_ahead and len(decoding) > MAX_GATHERED:
            return since, set()
        step_s = self._cost.seconds(len(decoding))
        waits = []
        for generation in decoding:
            if not self.runs_ahead and len(generation.guesses) >= generation.granted:
                continue  # served, as nearly all of a batch are when this is asked; the rest of the rule is asked of those that are not
            wait = self._wait_of(generation, step_s, since, alone=len(decoding) == 1)
            if wait is None and self.runs_ahead:
                return since, set()  # a sequence that has nothing to wait for is not delayed
            if wait is not None:
                waits.append(wait)
        unserved = [wait for wait in waits if wait.until > since]
        if not unserved:
            return since, set()
        until = max(wait.until for wait in unserved)
        if self.runs_ahead:
            until = min(until, since + step_s)
            if len(decoding) > 1:
                rule = gathering(len(decoding), max(wait.turnaround_s for wait in unserved), step_s)
                if len(waits) - len(unserved) >= rule.num_sequences:
                    return since, set()
                until = min(until, since + rule.longest_s)
        return until, {wait.link for wait in unserved if wait.has_none}

    def _wait_of(self, generation: Generation, step_s: float, since: float, alone: bool) -> _Wait | None:
        """How long the sequence would wait; None if it has nothing to wait for, `since` if it is served."""
        drafter = self._drafters.get(generation.drafter)
        limit = self._windows.limit(generation)
        if drafter is None or limit == 0 or drafter.timing.turnaround_s is None or drafter.suspended_until is not None:
            return None
        turnaround_s, gap_s = drafter.timing.turnaround_s, drafter.timing.gap_s
        pending, rate = len(generation.guesses), generation.acceptance.rate
        wanted = min(limit, generation.granted)
        if self.runs_ahead:
            useful = num_worth(self._lower(generation), self._least_worth(), limit)
            worth = num_worth_ahead(rate, gap_s, step_s, limit)
            if not alone:
                first_pays = pending > 0 or worth_of_next(rate, 0) * step_s > turnaround_s
                worth = min(worth, ENOUGH_WHEN_GATHERED) if first_pays else 0
            wanted = min(useful, worth)
        served = _Wait(drafter.link, since, turnaround_s, has_none=False)
        if pending >= wanted or drafter.idle or generation.is_resting or drafter.vain_waits:
            return served
        if self.runs_ahead and alone and not pending and not pays_to_wait(rate, generation.expected_at - since, gap_s, step_s, wanted, limit):
            return served
        slack = _SLACK if drafter.timing.turnaround.is_clean else _HOPEFUL_SLACK
        # The drafter may be at a guess of its old tail when it is told.
        slack_s = slack * gap_s if pending else max(slack * turnaround_s, gap_s)
        overdue = generation.expected_at + (wanted - pending - 1) * gap_s + slack_s
        return _Wait(drafter.link, overdue, turnaround_s, has_none=pending == 0)
