"""A running estimate of how often guesses are accepted. Fed with committed rounds only: in rejection mode anything else would bias the output."""

from dataclasses import dataclass

_DECAY = 0.9  # per round
_PRIOR_TRIES = 2.0


@dataclass(slots=True)
class Acceptance:
    """Decayed counts of accepted guesses and of tries, one try per guess up to the first rejected one. Starts as 1 in 2."""

    accepted: float = 0.5 * _PRIOR_TRIES
    tried: float = _PRIOR_TRIES

    @classmethod
    def starting_at(cls, rate: float) -> "Acceptance":
        """An estimate without rounds of its own."""
        return cls(rate * _PRIOR_TRIES, _PRIOR_TRIES)

    @property
    def rate(self) -> float:
        """Chance that a guess is accepted given that those before it were."""
        return self.accepted / self.tried

    def observe(self, num_accepted: int, num_scored: int) -> None:
        """Takes note of a committed round."""
        self.accepted = _DECAY * self.accepted + num_accepted
        self.tried = _DECAY * self.tried + num_accepted + (num_accepted < num_scored)
