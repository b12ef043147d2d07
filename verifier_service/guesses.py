"""The guesses that one sequence has received and not yet used. It does not know who made them or whether they are right.

The chain of a sequence is its committed tokens followed by the buffered guesses. A piece fits if the digest of everything
before its start is the chain's and if it agrees with the chain where the two overlap; the rest of it then joins. Running
ahead, late pieces and duplicates are all this one rule. On commit the drafter does the same to its tail, so both agree
on what is still pending without another word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.digest import extend, splitmix64
from shared.link import Distribution, Proposal


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of a piece.

    Args:
        num_joined: guesses that were added to the buffer.
        stale: why the rest did not fit: `late`, `mismatch`, `gap`, `duplicate` or `over_window`; None if all joined.
        num_stale: how many that were.
        agrees: the piece was made for this text and contradicts nothing of it, be it ever so late.
    """

    num_joined: int
    stale: str | None
    num_stale: int
    agrees: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What a commit did to the buffer.

    Args:
        foreseen: all committed tokens were buffered guesses.
        num_dropped: guesses dropped because the committed text contradicts them.
    """

    foreseen: bool
    num_dropped: int


@dataclass(slots=True)
class GuessBuffer:
    """Consecutive guesses beyond the committed tokens.

    Args:
        committed: the sequence's committed tokens when the buffer is made.
        token_ids: the guesses, the first of them at position `committed_length`.
        distributions: per guess what it was drawn from; None if it was certain.
        overlapped: per guess whether it arrived while a step was being computed.
    """

    committed: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Distribution | None] = field(default_factory=list)
    overlapped: list[bool] = field(default_factory=list)
    # Position that `_digests[0]` stands before; pieces that start earlier were made for a text that ended long ago.
    _base: int = field(init=False)
    # The chain's digest before each position from `_base` on; one entry more than the chain has tokens beyond `_base`.
    _digests: list[int] = field(init=False)
    # Tokens of the chain from `_base` on that are committed.
    _recent: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Walks the digest over what is committed."""
        self._base = len(self.committed)
        self._digests = [extend(0, self.committed)]
        self.committed = ()

    @property
    def committed_length(self) -> int:
        """Length of the committed text: the position of the first guess."""
        return self._base + len(self._recent)

    def __len__(self) -> int:
        """Number of guesses."""
        return len(self.token_ids)

    def join(self, proposal: Proposal, window: int, overlapped: bool) -> Joined:
        """Adds what fits of a piece; the buffer never holds more than `window` guesses."""
        size = len(proposal.token_ids)
        start, end = proposal.start, self.committed_length + len(self.token_ids)
        if start > end:
            return Joined(0, "gap", size)
        if start < self._base:
            return Joined(0, "late", size)
        if self._digests[start - self._base] != proposal.digest:
            return Joined(0, "late" if start < self.committed_length else "mismatch", size)
        overlap = min(end - start, size)
        if overlap and list(proposal.token_ids[:overlap]) != self._chain(start, overlap):
            return Joined(0, "late" if start < self.committed_length else "mismatch", size)
        num_joined = max(0, min(size - overlap, window - len(self.token_ids)))
        for index in range(overlap, overlap + num_joined):
            token_id = proposal.token_ids[index]
            self.token_ids.append(token_id)
            self.distributions.append(proposal.distributions[index] if proposal.distributions else None)
            self.overlapped.append(overlapped)
            self._digests.append(splitmix64(self._digests[-1] ^ token_id))
        if num_joined < size - overlap:
            return Joined(num_joined, "over_window", size - overlap - num_joined, agrees=True)
        if overlap and not num_joined:
            return Joined(0, "duplicate" if end > self.committed_length else "late", size, agrees=True)
        return Joined(num_joined, None, 0, agrees=True)

    def commit(self, token_ids: Sequence[int]) -> Settled:
        """Moves the committed length on; guesses that agree leave the head, the first that does not takes all with it."""
        num_agreeing = 0
        for guess, token_id in zip(self.token_ids, token_ids, strict=False):
            if guess != token_id:
                break
            num_agreeing += 1
        contradicted = num_agreeing < min(len(self.token_ids), len(token_ids))
        num_dropped = len(self.token_ids) - num_agreeing if contradicted else 0
        keep_from = len(self.token_ids) if contradicted else num_agreeing
        if num_agreeing < len(token_ids):
            del self._digests[len(self._recent) + num_agreeing + 1 :]
            for token_id in token_ids[num_agreeing:]:
                self._digests.append(splitmix64(self._digests[-1] ^ token_id))
        self._recent.extend(token_ids)
        self._drop_head(keep_from)
        return Settled(num_agreeing == len(token_ids), num_dropped)

    def drawn_from(self, count: int) -> tuple[Distribution, ...]:
        """What the first `count` guesses were drawn from; a guess that was certain stands for itself."""
        pairs = zip(self.token_ids[:count], self.distributions[:count], strict=True)
        return tuple(Distribution((token_id,), (1.0,)) if drawn is None else drawn for token_id, drawn in pairs)

    def clear(self) -> None:
        """Forgets all guesses: their drafter is gone, or is starting over."""
        del self._digests[len(self._recent) + 1 :]
        self._drop_head(len(self.token_ids))

    def _chain(self, start: int, length: int) -> list[int]:
        """`length` tokens of the chain from position `start` on."""
        recent = self._recent[start - self._base : start - self._base + length]
        first = max(0, start - self.committed_length)
        return [*recent, *self.token_ids[first : first + length - len(recent)]]

    def _drop_head(self, count: int) -> None:
        del self.token_ids[:count], self.distributions[:count], self.overlapped[:count]
