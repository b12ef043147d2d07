"""A running estimate of how often guesses are accepted. Fed with committed rounds only: in rejection mode anything else would bias the output."""

import math
from dataclasses import dataclass

_DECAY = 0.98  # per try: about the last fifty count
_PRIOR_TRIES = 4.0


@dataclass(slots=True)
class Acceptance:
    """Decayed counts of accepted guesses and of tries, one try per guess up to the first rejected one. Starts as 3 in 4, in hope."""

    accepted: float = 0.75 * _PRIOR_TRIES
    tried: float = _PRIOR_TRIES

    @classmethod
    def starting_at(cls, rate: float) -> "Acceptance":
        """An estimate without rounds of its own."""
        return cls(rate * _PRIOR_TRIES, _PRIOR_TRIES)

    @property
    def rate(self) -> float:
        """Chance that a guess is accepted given that those before it were."""
        return self.accepted / self.tried

    def bound(self, deviations: float) -> float:
        """The chance as it may well be, 0..1.

        Args:
            deviations: how many standard deviations above the estimate; negative for a lower bound.
        """
        mean = (self.accepted + 0.5) / (self.tried + 1.0)  # a few tries of one kind prove nothing
        return min(1.0, max(0.0, self.rate + deviations * math.sqrt(mean * (1.0 - mean) / (self.tried + 1.0))))

    def observe(self, num_accepted: int, num_scored: int) -> None:
        """Takes note of a committed round."""
        num_tried = num_accepted + (num_accepted < num_scored)
        kept = _DECAY**num_tried
        self.accepted = kept * self.accepted + num_accepted
        self.tried = kept * self.tried + num_tried
