"""What draft services send over the link as the values of `shared.link`, and back. Strict: a malformed frame is a `MalformedFrame`.

It knows shapes and numbers, not sequences: whether a guess fits anything is the engine's business, and a token id outside the
vocabulary is a rejected token, not a malformed one.
"""

from typing import Literal

import numpy as np
from outrider.v1 import link_pb2 as pb

from shared.errors import ProtocolViolation
from shared.link import (
    MAX_BATCH_PROPOSALS,
    MAX_DISTRIBUTION_PAIRS,
    MAX_PROPOSAL_TOKENS,
    Capacity,
    Decline,
    Distribution,
    FromDrafter,
    Goodbye,
    Heartbeat,
    Hello,
    Proposal,
    ProposalBatch,
    Resync,
)
from shared.rpc.convert_generate import MODE_OF, MODE_TO_PROTO

MAX_REASON_CHARS = 256
_MAX_INSTANCE_ID_CHARS = 128
_MAX_NAME_CHARS = 64
_MAX_SUM_ERROR = 1e-3

Tag = Literal["too_long", "bad_shape", "bad_probability", "bad_frame"]


class MalformedFrame(ProtocolViolation):
    """A frame that has no meaning. It is dropped whole and counted under `tag`; the request it was for goes on."""

    def __init__(self, tag: Tag, message: str) -> None:
        super().__init__(message)
        self.tag: Tag = tag


def to_speculate_request(frame: FromDrafter) -> pb.SpeculateRequest:
    """What a draft service sends."""
    match frame:
        case ProposalBatch():
            return pb.SpeculateRequest(proposals=_proposals_to_proto(frame))
        case Heartbeat():
            return pb.SpeculateRequest(heartbeat=pb.Heartbeat(sent_ns=frame.sent_ns, reply=frame.reply))
        case Decline():
            return pb.SpeculateRequest(decline=pb.Decline(sequence=frame.sequence, reason=frame.reason[:MAX_REASON_CHARS]))
        case Capacity():
            return pb.SpeculateRequest(capacity=pb.Capacity(sequences=frame.sequences))
        case Resync():
            return pb.SpeculateRequest(resync=pb.Resync(sequence=frame.sequence))
        case Goodbye():
            return pb.SpeculateRequest(goodbye=pb.Goodbye(reason=frame.reason[:MAX_REASON_CHARS]))
        case Hello():
            return pb.SpeculateRequest(
                hello=pb.Hello(
                    protocol_revision=frame.protocol_revision,
                    instance_id=frame.instance_id,
                    name=frame.name,
                    tokenizer_fingerprint=frame.tokenizer_fingerprint,
                    modes=[MODE_TO_PROTO[mode] for mode in frame.modes],
                    capacity=frame.capacity,
                    wants_hidden_state=frame.wants_hidden_state,
                )
            )


def from_speculate_request(message: pb.SpeculateRequest) -> FromDrafter:
    """What a draft service has sent.

    Raises:
        MalformedFrame: it has no meaning.
    """
    match message.WhichOneof("frame"):
        case "proposals":
            return _parse_proposals(message.proposals)
        case "heartbeat":
            return Heartbeat(message.heartbeat.sent_ns, message.heartbeat.reply)
        case "decline":
            return Decline(message.decline.sequence, message.decline.reason[:MAX_REASON_CHARS])
        case "capacity":
            return Capacity(message.capacity.sequences)
        case "resync":
            return Resync(message.resync.sequence)
        case "goodbye":
            return Goodbye(message.goodbye.reason[:MAX_REASON_CHARS])
        case "hello":
            return _parse_hello(message.hello)
        case _:
            raise MalformedFrame("bad_frame", "a frame must have one of its arms set")


def _proposals_to_proto(batch: ProposalBatch) -> pb.ProposalBatch:
    proposals = [
        pb.Proposal(
            sequence=proposal.sequence,
            start=proposal.start,
            digest=proposal.digest,
            token_ids=proposal.token_ids,
            distributions=map(_distribution_to_proto, proposal.distributions),
        )
        for proposal in batch.proposals
    ]
    nanoseconds = round(batch.draft_seconds * 1e9)
    return pb.ProposalBatch(step=batch.step, draft_time_ns=nanoseconds, proposals=proposals, idle=batch.idle, resting=batch.resting)


def _distribution_to_proto(sparse: Distribution) -> pb.Distribution:
    return pb.Distribution(token_ids=sparse.token_ids, probabilities=np.asarray(sparse.probabilities, "<f4").tobytes())


def _parse_proposals(message: pb.ProposalBatch) -> ProposalBatch:
    if len(message.proposals) > MAX_BATCH_PROPOSALS:
        raise MalformedFrame("too_long", f"a batch must have at most {MAX_BATCH_PROPOSALS} proposals; it has {len(message.proposals)}")
    if len(message.resting) > MAX_BATCH_PROPOSALS:
        raise MalformedFrame("too_long", f"a batch must tell of at most {MAX_BATCH_PROPOSALS} resting sequences; it tells of {len(message.resting)}")
    proposals = tuple(map(_parse_proposal, message.proposals))
    if len({proposal.sequence for proposal in proposals}) != len(proposals):
        raise MalformedFrame("bad_frame", "a batch must have at most one proposal for a sequence")
    return ProposalBatch(message.step, message.draft_time_ns / 1e9, proposals, message.idle, tuple(message.resting))


def _parse_proposal(message: pb.Proposal) -> Proposal:
    token_ids, sparse = tuple(message.token_ids), message.distributions
    if not token_ids:
        raise MalformedFrame("bad_shape", "a proposal must have at least one token")
    if len(token_ids) > MAX_PROPOSAL_TOKENS:
        raise MalformedFrame("too_long", f"a proposal must have at most {MAX_PROPOSAL_TOKENS} tokens; it has {len(token_ids)}")
    if len(sparse) not in (0, len(token_ids)):
        raise MalformedFrame("bad_shape", f"{len(token_ids)} tokens need as many distributions or none; there are {len(sparse)}")
    distributions = tuple(map(_parse_distribution, sparse, token_ids)) if sparse else ()
    return Proposal(message.sequence, message.start, message.digest, token_ids, distributions)


def _parse_distribution(message: pb.Distribution, guess: int) -> Distribution:
    """The distribution that `guess` was drawn from."""
    token_ids = tuple(message.token_ids)
    if len(token_ids) > MAX_DISTRIBUTION_PAIRS:
        raise MalformedFrame("too_long", f"a distribution must have at most {MAX_DISTRIBUTION_PAIRS} pairs; it has {len(token_ids)}")
    if len(message.probabilities) != 4 * len(token_ids):
        raise MalformedFrame("bad_shape", f"{len(token_ids)} ids need {4 * len(token_ids)} bytes of probabilities, not {len(message.probabilities)}")
    if len(set(token_ids)) != len(token_ids):
        raise MalformedFrame("bad_probability", "a distribution must name each id once")
    probabilities = np.frombuffer(message.probabilities, "<f4").astype(np.float64)
    if not (np.isfinite(probabilities).all() and (probabilities > 0).all()):
        raise MalformedFrame("bad_probability", "each probability must be a number above 0")
    if abs(probabilities.sum() - 1) > _MAX_SUM_ERROR:
        raise MalformedFrame("bad_probability", f"probabilities must add up to 1, not {probabilities.sum():.6g}")
    if guess not in token_ids:
        raise MalformedFrame("bad_probability", "a guess must have a probability in the distribution it was drawn from")
    return Distribution(token_ids, tuple(probabilities.tolist()))


def _parse_hello(message: pb.Hello) -> Hello:
    for text, most, name in ((message.instance_id, _MAX_INSTANCE_ID_CHARS, "instance_id"), (message.name, _MAX_NAME_CHARS, "name")):
        if not (1 <= len(text) <= most and text.isprintable()):
            raise MalformedFrame("bad_frame", f"hello.{name} must have 1 to {most} printable characters")
    modes = tuple(MODE_OF[mode] for mode in message.modes if mode in MODE_OF)  # one that we do not know is none that we will ask for
    return Hello(
        message.protocol_revision,
        message.instance_id,
        message.name,
        message.tokenizer_fingerprint[:128],
        modes,
        message.capacity,
        message.wants_hidden_state,
    )
