"""How far ahead of the committed text drafters may go: the windows that they are granted. It knows counts and times, and no tokens."""

from collections.abc import Sequence

from verifier_service.drafters import Drafter, Drafters
from verifier_service.exploration import Exploration
from verifier_service.generation import Generation
from verifier_service.guess_budget import expected_tokens, num_worth
from verifier_service.step_cost import StepCost
from verifier_service.wait_policy import LockStep, Tempo, plan_lock_step

DEVIATIONS = 0.25  # of the lower bound of acceptance that guesses are asked for and scored by, and of the upper one that windows are granted by
_PROBE_DEVIATIONS = (1.0, 2.0, 3.0)  # a probe asks for what would pay if acceptance were so much better than it seems
_FIRST_ROUND = 2  # guesses that a drafter that stands still during a step is asked for until it is known how fast it is
_LEAST_WORTH = 0.003  # a guess that is less likely to be right is not drafted ahead


class Windows:
    """Decides windows.

    Args:
        drafters: the attached ones.
        window: most tokens beyond the committed ones that a drafter may have sent; no more than `max_draft_tokens`: drafters stand still
            during a step, and a window is what the next step waits for.
        max_draft_tokens: most guesses scored for a sequence in a step.
        cost: of a step.
        exploration: pays for probes.
    """

    def __init__(self, drafters: Drafters, window: int, max_draft_tokens: int, cost: StepCost, exploration: Exploration) -> None:
        self._drafters = drafters
        self._window = window
        self._max_draft_tokens = max_draft_tokens
        self._cost = cost
        self._exploration = exploration
        self._runs_ahead = window > max_draft_tokens

    def limit(self, generation: Generation) -> int:
        """Most guesses of a sequence that a step could score."""
        return min(self._max_draft_tokens, generation.request.max_draft_tokens, generation.room)

    def first_window(self, generation: Generation, drafter: Drafter) -> int:
        """The window of a sequence that a drafter is told of anew."""
        if self._runs_ahead:
            generation.granted = min(self._window, generation.room)
        elif drafter.timing.turnaround_s is None or not self._cost.is_known:
            generation.granted = min(_FIRST_ROUND, self.limit(generation))
        else:
            generation.granted = self._plan([generation])[0]
        return generation.granted

    def grant(self, decoding: Sequence[Generation], num_rows: int, least_worth: float) -> tuple[int, ...]:
        """Decides the windows of all sequences that decode next, once a step is committed; each is then its `granted`.

        Args:
            decoding: the sequences.
            num_rows: tokens of a step without guesses.
            least_worth: the chance of acceptance below which a guess costs the batch more than it gives.

        Returns:
            The windows of those that have a drafter.
        """
        served = [(generation, drafter) for generation in decoding if (drafter := self._drafters.get(generation.drafter)) is not None]
        if not served:
            return ()
        measured = [(generation, drafter) for generation, drafter in served if drafter.timing.turnaround_s is not None and self._cost.is_known]
        planned: dict[int, int] = {}
        if self._runs_ahead:
            for generation, drafter in sorted(measured, key=_least_lately_tried):
                planned[generation.number] = self._horizon(generation, drafter, num_rows, least_worth)
        elif measured:
            counts = self._plan(decoding)
            planned = {generation.number: count for generation, count in zip(decoding, counts, strict=True)}
        unmeasured = self._window if self._runs_ahead else _FIRST_ROUND
        for generation, drafter in served:
            window = unmeasured if drafter.timing.turnaround_s is None else planned.get(generation.number, unmeasured)
            generation.granted = min(window, generation.room)
        return tuple(generation.granted for generation, _ in served)

    def _plan(self, decoding: Sequence[Generation]) -> Sequence[int]:
        """Windows of a batch whose drafters stand still during a step."""
        drafters = [self._drafters.get(generation.drafter) for generation in decoding]
        is_open = [drafter is not None and drafter.timing.turnaround_s is not None and drafter.suspended_until is None for drafter in drafters]
        limits = [self.limit(generation) if can else 0 for generation, can in zip(decoding, is_open, strict=True)]
        tempos = [Tempo(drafter.timing.turnaround_s or 0.0, drafter.timing.gap_s) if drafter is not None else Tempo(0.0, 0.0) for drafter in drafters]
        plan = self._lock_step(decoding, limits, tempos, -DEVIATIONS)
        if any(plan.budget.counts):
            return self._with_probes(decoding, limits, list(plan.budget.counts))
        if not any(limits):
            return plan.budget.counts
        probe = [int(limit > 0) for limit in limits]
        waiting_s = max(tempo.turnaround_s for tempo, limit in zip(tempos, limits, strict=True) if limit)
        for deviations in _PROBE_DEVIATIONS:
            hopeful = self._lock_step(decoding, limits, tempos, deviations)
            if any(hopeful.budget.counts):
                probe, waiting_s = list(hopeful.budget.counts), hopeful.waiting_s
                break
        # What a probe costs is what it is expected to lose: its guesses are of some use even if not of enough.
        seconds = self._cost.seconds(len(decoding) + sum(probe)) + waiting_s
        tokens = expected_tokens([generation.acceptance.bound(-1.0) for generation in decoding], probe)
        return probe if self._exploration.spend(seconds - tokens / plan.budget.rate) else plan.budget.counts

    def _lock_step(self, decoding: Sequence[Generation], limits: Sequence[int], tempos: Sequence[Tempo], deviations: float) -> LockStep:
        chances = [generation.acceptance.bound(deviations) for generation in decoding]
        return plan_lock_step(chances, limits, tempos, self._cost.seconds_of, len(decoding), sum(limits))

    def _with_probes(self, decoding: Sequence[Generation], limits: Sequence[int], counts: list[int]) -> list[int]:
        """Adds a guess here and there for sequences that are granted none: the others are waited for anyway, so it costs its row."""
        num_rows = len(decoding) + sum(counts)
        row_s = self._cost.seconds(num_rows + 1) - self._cost.seconds(num_rows)
        for index in self._exploration.choose(idle_by_turn(decoding, limits, counts), row_s):
            counts[index] = 1
        return counts

    def _horizon(self, generation: Generation, drafter: Drafter, num_rows: int, least_worth: float) -> int:
        """The window of a sequence whose drafter runs ahead: as far as a guess may be right, 0 if that is too late or not worth a row."""
        hopeful = generation.acceptance.bound(DEVIATIONS)
        bubble = (drafter.timing.turnaround_s or 0.0) / self._cost.seconds(num_rows)
        if hopeful >= least_worth and hopeful**bubble >= _LEAST_WORTH:
            return num_worth(hopeful, _LEAST_WORTH, self._window)
        return int(self._exploration.spend(self._cost.seconds(num_rows + 1) - self._cost.seconds(num_rows)))


def idle_by_turn(decoding: Sequence[Generation], limits: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Indices of the sequences that could have guesses and are to have none, the one least lately tried first."""
    idle = [index for index, (limit, count) in enumerate(zip(limits, counts, strict=True)) if limit and not count]
    return sorted(idle, key=lambda index: decoding[index].tried_at)


def _least_lately_tried(served: tuple[Generation, Drafter]) -> int:
    return served[0].tried_at
