"""The digest chain that says which text a guess was made for. It protects against confusion, not malice: verification does that."""

from collections.abc import Iterable

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): uint64 to uint64, a bijection."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def extend(digest: int, token_ids: Iterable[int]) -> int:
    """Digest of a text that is `token_ids` longer. The empty text has digest 0."""
    for token_id in token_ids:
        digest = splitmix64(digest ^ token_id)
    return digest
