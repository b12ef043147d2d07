"""What one draft service is still to be told. Nothing waits on a link: what cannot be sent yet is merged, and it is bounded.

Pure state of the event loop; it knows neither gRPC nor what the tokens are.
"""

from shared.errors import EngineFailure
from shared.link import Begin, Commit, End, StepBatch

_BYTES_PER_TOKEN = 5  # a varint of 32 bits at its longest
_BYTES_PER_ENTRY = 64


class Outbox:
    """Steps that a link has not taken yet, as one: at most one pending Begin, Commit and End per sequence.

    A commit joins the pending one of its sequence. A Begin makes all that was pending of its sequence void. An End too, and it is not sent at all
    for a sequence that the other side has never met.

    Args:
        max_bytes: beyond this estimate of its size the outbox has overflowed: it forgets everything and takes nothing more, since
            the link is to be closed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._step = 0
        self._begins: dict[int, Begin] = {}
        self._commits: dict[int, Commit] = {}
        self._ends: dict[int, End] = {}
        self._met: set[int] = set()
        self._is_pending = False
        self._pending_bytes = 0
        self._overflowed = False

    @property
    def overflowed(self) -> bool:
        """Whether more was pending than the outbox may hold."""
        return self._overflowed

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._is_pending

    @property
    def pending_bytes(self) -> int:
        """Size of what is pending on the wire, estimated from above."""
        return self._pending_bytes

    def add(self, batch: StepBatch) -> None:
        """Take in one engine step.

        Raises:
            EngineFailure: a commit does not follow the pending one of its sequence.
        """
        if self._overflowed:
            return
        self._step, self._is_pending = batch.step, True
        for begin in batch.begins:
            self._forget(begin.sequence)
            self._begins[begin.sequence] = begin
            self._pending_bytes += _size(begin)
        for commit in batch.commits:
            self._add_commit(commit)
        for end in batch.ends:
            self._forget(end.sequence)
            if end.sequence in self._met:
                self._ends[end.sequence] = end
                self._pending_bytes += _size(end)
        if self._pending_bytes > self._max_bytes:
            self._clear()
            self._overflowed = True

    def take(self) -> StepBatch | None:
        """All that is pending, as one batch under the number of the last step; None if there is nothing."""
        if not self._is_pending:
            return None
        batch = StepBatch(self._step, tuple(self._begins.values()), tuple(self._commits.values()), tuple(self._ends.values()))
        self._met |= self._begins.keys()
        self._met -= self._ends.keys()
        self._clear()
        return batch

    def _add_commit(self, commit: Commit) -> None:
        pending = self._commits.get(commit.sequence)
        if pending is not None:
            if commit.base_length != pending.base_length + len(pending.token_ids):
                raise EngineFailure(f"commit of sequence {commit.sequence} at {commit.base_length} does not follow the one at {pending.base_length}")
            self._pending_bytes -= _size(pending)
            commit = pending.then(commit)
        self._commits[commit.sequence] = commit
        self._pending_bytes += _size(commit)

    def _forget(self, sequence: int) -> None:
        dropped = (self._begins.pop(sequence, None), self._commits.pop(sequence, None), self._ends.pop(sequence, None))
        self._pending_bytes -= sum(_size(entry) for entry in dropped if entry is not None)

    def _clear(self) -> None:
        self._begins, self._commits, self._ends = {}, {}, {}
        self._is_pending, self._pending_bytes = False, 0


def _size(entry: Begin | Commit | End) -> int:
    if isinstance(entry, End):
        return _BYTES_PER_ENTRY
    if isinstance(entry, Begin):
        bias_bytes = 16 * len(entry.sampling.logit_bias) + _BYTES_PER_TOKEN * len(entry.suppressed_ids)
        return 2 * _BYTES_PER_ENTRY + _BYTES_PER_TOKEN * len(entry.token_ids) + bias_bytes + _hidden_bytes(entry)
    return _BYTES_PER_ENTRY + _BYTES_PER_TOKEN * len(entry.token_ids) + _hidden_bytes(entry)


def _hidden_bytes(entry: Begin | Commit) -> int:
    return len(entry.hidden.data) if entry.hidden is not None else 0
