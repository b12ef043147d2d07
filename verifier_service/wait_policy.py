"""How long a step may wait for guesses. Pure: numbers in, numbers out; it does not know links or clocks.

Two rules, one for each way of drafting:

- With a window of K the drafter stands still while the verifier computes (both services on one machine, or one round at a time for comparison).
  What is waited for now is not there later, so a wait is one more cost of the step: of all deadlines the one is chosen that gives the batch
  most expected tokens per second. It says how many guesses each sequence is granted, none included.
- With a wider window the drafter goes on meanwhile, and a guess in hand now only saves part of the bubble after the next miss. A lone sequence
  without guesses waits only if that beats going on plainly for every number of plain steps, so it is no slower than plain decoding at any distance.
  Several sequences wait only for drafters that answer within a third of a step, for less than half a step, until half of them have a few guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verifier_service.guess_budget import Budget, Cost, choose

MAX_GATHERED = 16  # sequences that run ahead and still wait for one another
ENOUGH_WHEN_GATHERED = 3
_GATHER_SHARE = 0.4  # of a step


@dataclass(frozen=True, slots=True)
class Tempo:
    """How fast guesses come once the drafter hears of a commit.

    Args:
        turnaround_s: from the commit to the first guess that knows it.
        gap_s: between two guesses of a sequence.
    """

    turnaround_s: float
    gap_s: float

    def deadline_s(self, count: int) -> float:
        """When `count` guesses are there, at least one."""
        return self.turnaround_s + (count - 1) * self.gap_s

    def num_by(self, deadline_s: float, limit: int) -> int:
        """Guesses that are there by then, at most `limit`."""
        if deadline_s < self.turnaround_s:
            return 0
        return limit if self.gap_s <= 0 else min(limit, 1 + int((deadline_s - self.turnaround_s) / self.gap_s + 1e-9))


@dataclass(frozen=True, slots=True)
class LockStep:
    """What a batch drafts while it stands still: guesses per sequence, and how long they are expected to take."""

    budget: Budget
    waiting_s: float


def plan_lock_step(
    acceptances: Sequence[float], limits: Sequence[int], tempos: Sequence[Tempo], cost: Cost, num_rows: int, max_guesses: int
) -> LockStep:
    """The deadline, and the guesses for each sequence, with most tokens per second for the batch.

    Args:
        acceptances: per sequence, the chance that a guess is accepted given that those before it were.
        limits: per sequence, most guesses that it may be granted; 0 for one without a drafter.
        tempos: per sequence, of its drafter.
        cost: seconds of a step for numbers of tokens.
        num_rows: tokens in the step without guesses.
        max_guesses: most guesses in all.
    """
    plain_s = float(cost(np.array([num_rows]))[0])
    # Guesses give no more than a + a^2 + ... tokens of a sequence: from some wait on that is too little even if they cost nothing else.
    most = sum(min(limit, a / (1.0 - a) if a < 1.0 else limit) for a, limit in zip(acceptances, limits, strict=True))
    longest_s = plain_s * most / max(1, len(limits))
    open_tempos = {tempo for tempo, limit in zip(tempos, limits, strict=True) if limit}
    deadlines_s = {tempo.deadline_s(count) for tempo in open_tempos for count in range(1, max(limits) + 1)}
    waiting_s = np.array([0.0, *sorted(deadline_s for deadline_s in deadlines_s if deadline_s < longest_s)])
    index, budget = choose(acceptances, _reachable(limits, tempos, waiting_s), waiting_s, cost, num_rows, max_guesses)
    return LockStep(budget, float(waiting_s[index]))


def _reachable(limits: Sequence[int], tempos: Sequence[Tempo], deadlines_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Guesses that each sequence has by each deadline; by the first one, none. [deadlines, B]"""
    kinds = list(dict.fromkeys(tempos))
    counts = np.array([[tempo.num_by(deadline_s, max(limits)) for tempo in kinds] for deadline_s in deadlines_s], dtype=np.int64)
    reachable = np.minimum(counts[:, [kinds.index(tempo) for tempo in tempos]], limits)
    reachable[0] = 0
    return reachable


def worth_of_next(acceptance: float, count: int) -> float:
    """What one guess more than `count` in hand saves while the drafter goes on during a step, in steps: part of the bubble after the next miss."""
    return acceptance ** (count + 1) * (1 - acceptance)


def num_worth_ahead(acceptance: float, gap_s: float, step_s: float, max_guesses: int) -> int:
    """Guesses worth waiting for while the drafter goes on during a step, once the first one is: at least 1, unless none may be scored."""
    for count in range(1, max_guesses):
        if worth_of_next(acceptance, count) * step_s <= gap_s:
            return count
    return max_guesses


def pays_to_wait(acceptance: float, due_s: float, gap_s: float, step_s: float, num_worth: int, max_guesses: int) -> bool:
    """Whether a lone sequence without guesses does better to wait for `num_worth` of them than to take m = 1, 2, ... plain steps first.

    Args:
        acceptance: chance that a guess is accepted given that those before it were, 0..1.
        due_s: until the next guess; negative if it is late.
        gap_s: between two guesses.
        step_s: of a plain step.
        num_worth: guesses that would be waited for, at least 1.
        max_guesses: most guesses scored in a step.
    """

    def cost_s(num_plain: int) -> float:
        plain_s = step_s * sum(acceptance**i for i in range(num_plain))
        ready_s = due_s + (num_worth - 1) * gap_s
        there = num_worth if gap_s <= 0 else int(min(max_guesses, max(num_worth, 1 + (num_plain * step_s - due_s) / gap_s)))
        rest_s = max(0.0, ready_s - num_plain * step_s) + step_s * (1 + acceptance ** (there + 1))
        return plain_s + acceptance**num_plain * rest_s

    waiting_s = cost_s(0)
    # Beyond the steps that fit into the wait nothing gets cheaper.
    return all(waiting_s < cost_s(m) for m in range(1, 2 + int(max(0.0, due_s + num_worth * gap_s) / step_s)))


@dataclass(frozen=True, slots=True)
class Gathering:
    """When a batch whose drafters run ahead stops waiting.

    Args:
        num_sequences: so many must be served; 0 never waits.
        longest_s: but for no longer.
    """

    num_sequences: int
    longest_s: float


def gathering(num_sequences: int, turnaround_s: float, step_s: float) -> Gathering:
    """How several sequences wait for drafters that run ahead.

    Args:
        num_sequences: that speculate.
        turnaround_s: of the slowest of their drafters.
        step_s: of a plain step of the batch.
    """
    if num_sequences > MAX_GATHERED or turnaround_s > step_s / 3:
        return Gathering(0, 0.0)
    return Gathering((num_sequences + 1) // 2, _GATHER_SHARE * step_s)
