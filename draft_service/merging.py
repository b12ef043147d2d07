"""Guesses that wait to be sent, as one message: what piled up while the link took the last one. It does not know the link."""

from collections import deque
from itertools import chain

from shared.link import MAX_BATCH_PROPOSALS, FromDrafter, Proposal, ProposalBatch

_MAX_IDS = 1 << 16  # in one merged message: far below what gRPC takes


def take_next(outgoing: deque[FromDrafter], max_tokens: int) -> FromDrafter:
    """Takes the first frame, and with a ProposalBatch those right behind it that say the same in fewer messages.

    Only batches that know the same step are put together: nothing was committed between them, so pieces of a sequence follow one another, and
    the message says of all its guesses what they were made after.

    Args:
        outgoing: at least one frame; what is taken is gone from it.
        max_tokens: most guesses in one proposal that the verifier takes.
    """
    first = outgoing.popleft()
    if not isinstance(first, ProposalBatch) or not outgoing:
        return first
    batches, pieces, num_ids = [first], {proposal.sequence: [proposal] for proposal in first.proposals}, first.num_ids
    while outgoing:
        following = outgoing[0]
        if not isinstance(following, ProposalBatch) or following.step != first.step:
            break
        num_ids += following.num_ids
        if num_ids > _MAX_IDS or not _add(pieces, following.proposals, max_tokens):
            break
        outgoing.popleft()
        batches.append(following)
    if len(batches) == 1:
        return first
    resting = dict.fromkeys(chain.from_iterable(batch.resting for batch in batches))
    proposals = tuple(map(_joined, pieces.values()))
    return ProposalBatch(first.step, sum(batch.draft_seconds for batch in batches), proposals, batches[-1].idle, tuple(resting))


def _add(pieces: dict[int, list[Proposal]], proposals: tuple[Proposal, ...], max_tokens: int) -> bool:
    """Adds what follows to what is there; nothing if it is too much, or does not follow."""
    for proposal in proposals:
        known = pieces.get(proposal.sequence)
        if known is None:
            continue
        first, last, size = known[0], known[-1], len(proposal.token_ids)
        follows = proposal.start == last.start + len(last.token_ids) and bool(proposal.distributions) == bool(last.distributions)
        if not follows or proposal.start + size - first.start > max_tokens:
            return False
    if len(pieces.keys() | {proposal.sequence for proposal in proposals}) > MAX_BATCH_PROPOSALS:
        return False
    for proposal in proposals:
        pieces.setdefault(proposal.sequence, []).append(proposal)
    return True


def _joined(pieces: list[Proposal]) -> Proposal:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    token_ids = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
    return Proposal(first.sequence, first.start, first.digest, token_ids, tuple(chain.from_iterable(piece.distributions for piece in pieces)))
