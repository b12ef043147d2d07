"""When requests are meant to start in an open loop. It knows neither requests nor clocks."""

from itertools import accumulate
from random import Random


def arrival_times(num_requests: int, rate: float, burstiness: float, random: Random) -> list[float]:
    """Intended start times, from the first request on: gaps are gamma distributed with mean 1 / rate.

    Args:
        num_requests: how many.
        rate: requests per second on average, positive; infinite starts all at once.
        burstiness: shape of the gamma distribution, positive, as in vLLM's benchmark. 1 is a Poisson process, below 1 requests come in
            bursts, a large value is a metronome: the gaps' coefficient of variation is 1 / sqrt(burstiness).
        random: source of the draws.

    Returns:
        Ascending seconds; the first is 0.
    """
    if rate == float("inf"):
        return [0.0] * num_requests
    gaps = (random.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_requests - 1))
    return [0.0, *accumulate(gaps)]
