"""Guesses that pile up as one message: on the draft service while the link takes the last one, on the verifier while a step is computed.

It knows neither the link nor the engine.
"""

from collections import deque
from itertools import chain

from shared.digest import extend
from shared.link import MAX_BATCH_PROPOSALS, FromDrafter, Proposal, ProposalBatch

_MAX_IDS = 1 << 16  # in one merged message: far below what gRPC takes


class Pile:
    """ProposalBatches, one right behind the other, that say the same as one would. What a piece costs does not depend on how many there are.

    Only batches that know the same step go together: nothing was committed between them, so pieces of a sequence follow one another, and the
    pile says of all its guesses what they were made after.

    Args:
        first: the earliest one.
        max_tokens: most guesses in one proposal.
    """

    def __init__(self, first: ProposalBatch, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._batches = [first]
        self._pieces = {proposal.sequence: [proposal] for proposal in first.proposals}
        self._is_open = len(self._pieces) == len(first.proposals)  # two pieces of a sequence at once are left as they came
        self._num_ids = first.num_ids

    @property
    def step(self) -> int:
        """The step that all of them know."""
        return self._batches[0].step

    def add(self, batch: ProposalBatch) -> bool:
        """Adds the next one; False, and nothing is changed, if that would be too much or does not follow."""
        num_ids = self._num_ids + batch.num_ids
        sequences = {proposal.sequence for proposal in batch.proposals}
        is_one_each = self._is_open and len(sequences) == len(batch.proposals)
        if batch.step != self.step or not is_one_each or num_ids > _MAX_IDS or len(self._pieces.keys() | sequences) > MAX_BATCH_PROPOSALS:
            return False
        if not all(self._follows(proposal) for proposal in batch.proposals):
            return False
        for proposal in batch.proposals:
            self._pieces.setdefault(proposal.sequence, []).append(proposal)
        self._batches.append(batch)
        self._num_ids = num_ids
        return True

    def to_batch(self) -> ProposalBatch:
        """All of them as one."""
        if len(self._batches) == 1:
            return self._batches[0]
        draft_seconds = sum(batch.draft_seconds for batch in self._batches)
        resting = dict.fromkeys(chain.from_iterable(batch.resting for batch in self._batches))
        return ProposalBatch(self.step, draft_seconds, tuple(map(_joined, self._pieces.values())), self._batches[-1].idle, tuple(resting))

    def _follows(self, proposal: Proposal) -> bool:
        pieces = self._pieces.get(proposal.sequence)
        if pieces is None:
            return True
        first, last = pieces[0], pieces[-1]
        is_next = proposal.start == last.start + len(last.token_ids) and proposal.digest == extend(last.digest, last.token_ids)
        is_alike = bool(proposal.distributions) == bool(last.distributions)
        return is_next and is_alike and proposal.start + len(proposal.token_ids) - first.start <= self._max_tokens


def take_next(outgoing: deque[FromDrafter], max_tokens: int) -> FromDrafter:
    """Takes the first frame, and with a ProposalBatch those right behind it that say the same in fewer messages.

    Args:
        outgoing: at least one frame; what is taken is gone from it.
        max_tokens: most guesses in one proposal that the verifier takes.
    """
    first = outgoing.popleft()
    if not isinstance(first, ProposalBatch):
        return first
    pile = Pile(first, max_tokens)
    while outgoing and isinstance(following := outgoing[0], ProposalBatch) and pile.add(following):
        outgoing.popleft()
    return pile.to_batch()


def _joined(pieces: list[Proposal]) -> Proposal:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    token_ids = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
    return Proposal(first.sequence, first.start, first.digest, token_ids, tuple(chain.from_iterable(piece.distributions for piece in pieces)))
