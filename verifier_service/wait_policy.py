"""How long a step may wait for guesses. Pure: numbers in, numbers out; it does not know links or clocks.

The rule, first and simple (a controller that weighs the whole batch replaces it later):

- `num_worth` guesses per sequence are worth waiting for. With a window beyond K the drafter goes on while the verifier
  computes, and a guess in hand now only saves the bubble after the next miss; with a window of K (both services on one
  machine) it stands still, and the classic lock-step rule applies: one more guess pays while its chance to be accepted,
  times the cost of a token, exceeds its time.
- A step waits until each sequence has so many, or its drafter has nothing more, or the time is up: the measured turnaround
  plus a gap for each further guess, with slack, and never more than one plain step after the last commit.
- In a batch of several sequences with a window beyond K it waits only for drafters that answer within a third of a step,
  and only until half of the sequences are served: the others' tokens are delayed too.
- A wait that was in vain is not repeated until that drafter has sent something.
"""

_SLACK = 1.25
_MAX_GATHERED = 16


def num_worth_waiting_for(acceptance: float, gap_s: float, step_s: float, max_guesses: int, runs_ahead: bool) -> int:
    """How many guesses of a sequence are worth waiting for, 0..max_guesses.

    Args:
        acceptance: probability that a guess is accepted given that those before it were, 0..1.
        gap_s: time between two guesses of a sequence, seconds.
        step_s: time of a plain step, seconds.
        max_guesses: most guesses scored in a step.
        runs_ahead: whether the drafter goes on while the verifier computes.
    """
    if max_guesses == 0:
        return 0
    if runs_ahead:
        for count in range(1, max_guesses + 1):
            if acceptance ** (count + 1) * (1 - acceptance) * step_s <= gap_s:
                return count
        return max_guesses
    worth = 0
    tokens, cost_s = 1.0, step_s
    for count in range(1, max_guesses + 1):
        if acceptance**count * cost_s < gap_s * tokens:
            break
        worth = count
        tokens += acceptance**count
        cost_s += gap_s
    return worth


def wait_limit_s(turnaround_s: float, gap_s: float, num_worth: int, step_s: float) -> float:
    """Longest time after a commit that a step may still wait, seconds."""
    if num_worth == 0:
        return 0.0
    return min(step_s, _SLACK * (turnaround_s + (num_worth - 1) * gap_s))


def num_sequences_to_serve(num_sequences: int, turnaround_s: float, step_s: float, runs_ahead: bool) -> int:
    """How many of the speculating sequences must have their guesses before a step stops waiting; 0 never waits."""
    if num_sequences == 1 or not runs_ahead:
        return num_sequences
    if num_sequences > _MAX_GATHERED or turnaround_s > step_s / 3:
        return 0
    return (num_sequences + 1) // 2
