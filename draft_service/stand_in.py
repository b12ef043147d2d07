"""A proposer that only takes time, and is right as often as it is said to be: for measuring all that is around a draft model."""

import time
from collections.abc import Callable, Sequence

from draft_service.proposer import Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.sampling import Mode
from shared.simulation import Simulation, next_id, wrong_id


class StandInProposer:
    """One guess per sequence and call, right or wrong by a coin keyed by the sequence and the position.

    A prompt costs it nothing. In rejection mode its guesses are certain, so they are accepted just as often.

    Args:
        simulation: how long a call takes, and how often a guess is right.
        sleep: takes seconds.
        clock: monotonic seconds; what a call really costs here counts towards its time.
    """

    name = "stand-in"
    kinds = ("stand-in",)
    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(self, simulation: Simulation, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = ProposerStats()
        self._simulation = simulation
        self._sleep = sleep
        self._clock = clock

    def open(self, sequence: DraftSequence) -> None:
        """Nothing to remember."""

    def close(self, sequence: DraftSequence) -> None:
        """Nothing to forget."""

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess]]:
        """One guess for each, after the time that a draft model's pass is said to take."""
        began = self._clock()
        guesses = [[Guess(self._guess(sequence))] for sequence, _ in requests]
        self.stats.forwards += 1
        self.stats.fed_tokens += len(requests)
        self._sleep(max(0.0, began + self._simulation.draft_s(len(requests)) - self._clock()))
        return guesses

    def _guess(self, sequence: DraftSequence) -> int:
        last, position = (sequence.tail or sequence.committed)[-1], sequence.length
        say = next_id if self._simulation.is_right(sequence.draft_seed, position) else wrong_id
        return say(last, position)
