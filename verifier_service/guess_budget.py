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


def allot(acceptances: Sequence[float], limits: Sequence[int], cost: Cost, num_rows: int, max_guesses: int) -> Budget:
    """Cuts the guesses where tokens per second are highest.

    Args:
        acceptances: per sequence, the chance that a guess is accepted given that those before it were.
        limits: per sequence, the guesses that it has.
        cost: seconds of a step for numbers of tokens, increasing.
        num_rows: tokens in the step without guesses, one per sequence and those of prompts.
        max_guesses: most guesses in all.
    """
    _, budget = choose(acceptances, np.array([limits], dtype=np.int64), np.zeros(1), cost, num_rows, max_guesses)
    return budget


def choose(
    acceptances: Sequence[float], limits: NDArray[np.int64], waiting_s: NDArray[np.float64], cost: Cost, num_rows: int, max_guesses: int
) -> tuple[int, Budget]:
    """Of several choices of guesses the one that, well cut, gives most tokens per second: the first of the best.

    Args:
        acceptances: [B], as in `allot`.
        limits: [C, B], the guesses that each sequence has if it is that choice.
        waiting_s: [C], the time that those guesses take to come, whatever is made of them.
        cost: as in `allot`, and likewise `num_rows` and `max_guesses`.

    Returns:
        Index of the choice, and the budget.
    """
    num_sequences, width = limits.shape[1], int(limits.max(initial=0))
    chances = np.asarray(acceptances, dtype=np.float64)
    worths = np.multiply.accumulate(np.repeat(chances[:, None], width, axis=1), axis=1).ravel()
    # Stable, and worths never rise along a sequence: a guess is taken only after those before it.
    order = np.argsort(-worths, kind="stable")
    owners, places = np.divmod(order, max(1, width))
    is_taken = places < limits[:, owners]
    numbers = np.zeros((len(limits), len(order) + 1), dtype=np.int64)
    np.cumsum(is_taken, axis=1, out=numbers[:, 1:])
    if numbers[:, -1].max() > max_guesses:
        is_taken &= numbers[:, 1:] <= max_guesses
        np.minimum(numbers, max_guesses, out=numbers)
    tokens = np.full(numbers.shape, float(num_sequences))
    tokens[:, 1:] += np.cumsum(is_taken * worths[order], axis=1)
    seconds = cost(num_rows + np.arange(numbers.max() + 1))[numbers] + waiting_s[:, None]
    best, cut = divmod(int(np.argmax(tokens / seconds)), numbers.shape[1])  # of equals the choice that waits least, with the fewest guesses
    counts = np.bincount(owners[:cut][is_taken[best, :cut]], minlength=num_sequences)
    return best, Budget(tuple(counts.tolist()), float(tokens[best, cut]), float(seconds[best, cut]))


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
