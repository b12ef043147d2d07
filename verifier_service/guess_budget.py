"""How many guesses of each sequence a step scores: those that raise the tokens per second of the whole batch. Pure: rates in, counts out.

The greedy rule of SmartSpec (Liu et al. 2024): a guess is worth the chance that it and all before it are accepted, and costs what the step grows
by. Guesses are taken in the order of their worth, and the cut lies where expected tokens per second are highest: for a linear cost that is where
the next one's worth falls below its cost times the rate of the batch; any other curve, with its steps, is met by comparing all cuts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Budget:
    """Guesses for each sequence, and what the step is expected to give.

    Args:
        counts: guesses per sequence.
        num_tokens: expected tokens of the step, the target's own included.
        seconds: expected time, waiting included.
    """

    counts: tuple[int, ...]
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.num_tokens / self.seconds


def allot(acceptances: Sequence[float], limits: Sequence[int], cost: Cost, num_rows: int, max_guesses: int, waiting_s: float = 0.0) -> Budget:
    """Cuts the guesses where tokens per second are highest.

    Args:
        acceptances: per sequence, the chance that a guess is accepted given that those before it were.
        limits: per sequence, the guesses that it has.
        cost: seconds of a step for numbers of tokens, increasing.
        num_rows: tokens in the step without guesses, one per sequence and those of prompts.
        max_guesses: most guesses in all.
        waiting_s: time that the guesses take to come, whatever their number.
    """
    num_sequences = len(limits)
    width = max(limits, default=0)
    places = np.arange(width)
    worths = np.cumprod(np.broadcast_to(np.asarray(acceptances, dtype=np.float64)[:, None], (num_sequences, width)), axis=1)
    owners, columns = np.nonzero(places[None, :] < np.asarray(limits)[:, None])
    # Stable, and worths never rise along a sequence: a guess is taken only after those before it.
    order = np.argsort(-worths[owners, columns], kind="stable")[:max_guesses]
    tokens = num_sequences + np.concatenate(([0.0], np.cumsum(worths[owners, columns][order])))
    seconds = cost(num_rows + np.arange(len(tokens))) + waiting_s
    best = int(np.argmax(tokens / seconds))  # the first: of equals the one with the fewest guesses
    counts = np.bincount(owners[order[:best]], minlength=num_sequences)
    return Budget(tuple(counts.tolist()), float(tokens[best]), float(seconds[best]))


def num_worth(acceptance: float, least_worth: float, limit: int) -> int:
    """How many guesses in a row each have a chance of at least `least_worth` to be accepted, at most `limit`."""
    count, worth = 0, acceptance
    while count < limit and worth >= least_worth:
        worth *= acceptance
        count += 1
    return count


def expected_tokens(acceptances: Sequence[float], counts: Sequence[int]) -> float:
    """Tokens that a step is expected to give with so many guesses of each sequence, the target's own included."""
    return sum(1.0 + sum(acceptance**place for place in range(1, count + 1)) for acceptance, count in zip(acceptances, counts, strict=True))
