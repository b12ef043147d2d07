"""How long a step may wait for guesses. Pure: numbers in, numbers out; it does not know links or clocks.

The rule, first and simple (a controller that weighs the whole batch replaces it later):

- A sequence is *served* when it has as many guesses as are worth waiting for, or its drafter has nothing more.
- With a window of K the drafter is to stand still while the verifier computes (both services on one machine): the number worth waiting
  for is the one that gives most tokens per second, the turnaround and a gap per further guess included. It is also the window that is
  granted, so that nothing is drafted beside a step. It may be 0; then one guess is asked for now and then, to learn whether that has changed.
- With a wider window the drafter goes on meanwhile, and a guess in hand now only saves the bubble after the next miss. A lone sequence
  without guesses waits only if that beats going on plainly for every number of plain steps (the wait rule of the design's simulation: no slower than
  plain decoding at any distance). Several sequences wait only for drafters that answer within a third of a step, until half are served.
- A wait ends when the next guess is overdue, and never lasts longer than one mean decode step. One that was in vain is not repeated
  until that drafter has sent a guess that fits.
"""

_MAX_GATHERED = 16


def num_worth_in_lock_step(acceptance: float, turnaround_s: float, gap_s: float, step_s: float, max_guesses: int) -> int:
    """Guesses worth drafting and waiting for while the drafter stands still during a step, 0..max_guesses.

    Args:
        acceptance: chance that a guess is accepted given that those before it were, 0..1.
        turnaround_s: from a commit to the first guess that knows it.
        gap_s: between two guesses of a sequence.
        step_s: of a plain step.
        max_guesses: most guesses scored in a step.
    """
    best, best_rate = 0, 1.0 / step_s
    tokens = 1.0
    for count in range(1, max_guesses + 1):
        drafting_s = turnaround_s + (count - 1) * gap_s
        if drafting_s > step_s:  # no wait is longer
            break
        tokens += acceptance**count
        rate = tokens / (step_s + drafting_s)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def num_worth_ahead(acceptance: float, gap_s: float, step_s: float, max_guesses: int) -> int:
    """Guesses worth waiting for while the drafter goes on during a step: one more must save more of the next bubble than it costs."""
    for count in range(1, max_guesses):
        if acceptance ** (count + 1) * (1 - acceptance) * step_s <= gap_s:
            return count
    return max_guesses


def pays_to_wait(acceptance: float, due_s: float, gap_s: float, step_s: float, num_worth: int, max_guesses: int) -> bool:
    """Whether a lone sequence without guesses does better to wait for `num_worth` of them than to take m = 1, 2, ... plain steps first.

    Args:
        acceptance: as above.
        due_s: until the first guess is expected; in the past if negative.
        gap_s: between two guesses.
        step_s: of a plain step.
        num_worth: guesses to wait for.
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


def num_sequences_to_serve(num_sequences: int, turnaround_s: float, step_s: float, runs_ahead: bool) -> int:
    """How many of the speculating sequences must be served before a step stops waiting; 0 never waits."""
    if num_sequences == 1 or not runs_ahead:
        return num_sequences
    if num_sequences > _MAX_GATHERED or turnaround_s > step_s / 3:
        return 0
    return (num_sequences + 1) // 2
