"""Guesses that pile up as one message: on the draft service while the link takes the last one, on the verifier while a step is computed.

It knows neither the link nor the engine.
"""

from collections import deque
from itertools import chain

from shared.digest import extend
from shared.link import MAX_BATCH_PROPOSALS, FromDrafter, Proposal, ProposalBatch

_MAX_IDS = 1 << 16  # in one merged message: far below what gRPC takes


def take_next(outgoing: deque[FromDrafter], max_tokens: int) -> FromDrafter:
    """Takes the first frame, and with a ProposalBatch those right behind it that say the same in fewer messages.

    Args:
        outgoing: at least one frame; what is taken is gone from it.
        max_tokens: most guesses in one proposal that the verifier takes.
    """
    first = outgoing.popleft()
    while outgoing and (joined := merged(first, outgoing[0], max_tokens)) is not None:
        first = joined
        outgoing.popleft()
    return first


def merged(first: FromDrafter, second: FromDrafter, max_tokens: int) -> ProposalBatch | None:
    """Two frames of a drafter, one right behind the other, as one; None if that would be too much, or say something else.

    Only batches that know the same step are put together: nothing was committed between them, so pieces of a sequence follow one another, and
    the message says of all its guesses what they were made after.

    Args:
        first: the earlier one.
        second: the later one.
        max_tokens: most guesses in one proposal.
    """
    if not isinstance(first, ProposalBatch) or not isinstance(second, ProposalBatch) or first.step != second.step:
        return None
    pieces = {proposal.sequence: proposal for proposal in first.proposals}
    if len(pieces) < len(first.proposals) or first.num_ids + second.num_ids > _MAX_IDS:
        return None
    for proposal in second.proposals:
        known = pieces.get(proposal.sequence)
        joined = proposal if known is None else _joined(known, proposal, max_tokens)
        if joined is None:
            return None
        pieces[proposal.sequence] = joined
    if len(pieces) > MAX_BATCH_PROPOSALS:
        return None
    resting = tuple(dict.fromkeys(chain(first.resting, second.resting)))
    return ProposalBatch(first.step, first.draft_seconds + second.draft_seconds, tuple(pieces.values()), second.idle, resting)


def _joined(first: Proposal, second: Proposal, max_tokens: int) -> Proposal | None:
    token_ids = first.token_ids + second.token_ids
    follows = second.start == first.start + len(first.token_ids) and bool(second.distributions) == bool(first.distributions)
    if not follows or len(token_ids) > max_tokens or second.digest != extend(first.digest, first.token_ids):
        return None
    return Proposal(first.sequence, first.start, first.digest, token_ids, first.distributions + second.distributions)
