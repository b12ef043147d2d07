"""The comparison of paired measurements, the same as `outrider bench` uses."""

from client.bench.ratio import MIN_PAIRS, Ratio, interleave, paired_ratio

__all__ = ["MIN_PAIRS", "Ratio", "interleave", "paired_ratio"]
