"""What the verifier sends over the link as the values of `shared.link`, and back; long Begins cross in pieces.

It knows messages and their sizes, not sequences: what is told when is the business of the outbox and the engine.
"""

from collections.abc import Iterator
from itertools import chain
from math import prod

from outrider.v1 import link_pb2 as pb

from shared.errors import InvalidRequest
from shared.link import BEGIN_PIECE_TOKENS, Begin, Commit, End, EndReason, FromVerifier, Goodbye, Heartbeat, HiddenState, StepBatch, Welcome
from shared.rpc.convert_generate import MODE_OF, MODE_TO_PROTO, parse_sampling, sampling_to_proto
from shared.rpc.convert_link import MAX_REASON_CHARS, MalformedFrame

_MAX_MESSAGE_BYTES = 4 << 20  # estimated from above, and far below the link's message limit
_BYTES_PER_ID = 5  # a varint of 32 bits at its longest
_NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ANY_TOKEN_ID = 1 << 32

_END_REASON_TO_PROTO = {
    EndReason.FINISHED: pb.END_REASON_FINISHED,
    EndReason.CANCELLED: pb.END_REASON_CANCELLED,
    EndReason.REASSIGNED: pb.END_REASON_REASSIGNED,
}
_END_REASON_OF = {value: reason for reason, value in _END_REASON_TO_PROTO.items()}


def to_speculate_responses(frame: FromVerifier) -> Iterator[pb.SpeculateResponse]:
    """What the verifier sends: one message, or several where long Begins or many hidden states would make it too large."""
    match frame:
        case StepBatch():
            for batch in _split_batch(frame):
                yield pb.SpeculateResponse(step=batch)
        case Heartbeat():
            yield pb.SpeculateResponse(heartbeat=pb.Heartbeat(sent_ns=frame.sent_ns, reply=frame.reply))
        case Goodbye():
            yield pb.SpeculateResponse(goodbye=pb.Goodbye(reason=frame.reason[:MAX_REASON_CHARS]))
        case Welcome():
            welcome = pb.Welcome(
                vocab_size=frame.vocab_size,
                max_proposal_tokens=frame.max_proposal_tokens,
                max_distribution_pairs=frame.max_distribution_pairs,
                max_model_len=frame.max_model_len,
                hidden_size=frame.hidden_size,
            )
            yield pb.SpeculateResponse(welcome=welcome)


class PieceJoiner:
    """Turns what the verifier has sent into values; holds the pieces of a Begin that is not complete yet.

    Args:
        max_model_len: the most token ids that the pieces of one Begin may add up to; until a Welcome says more, none.
    """

    def __init__(self, max_model_len: int = 0) -> None:
        self._max_model_len = max_model_len
        self._open: pb.Begin | None = None

    def parse(self, message: pb.SpeculateResponse) -> FromVerifier:
        """What the verifier has sent. A StepBatch has only the Begins that are whole.

        Raises:
            MalformedFrame: it has no meaning, or pieces do not follow each other.
        """
        match message.WhichOneof("frame"):
            case "step":
                begins = tuple(begin for piece in message.step.begins for begin in self._join(piece))
                commits = tuple(map(_parse_commit, message.step.commits))
                return StepBatch(message.step.step, begins, commits, tuple(map(_parse_end, message.step.ends)))
            case "heartbeat":
                return Heartbeat(message.heartbeat.sent_ns, message.heartbeat.reply)
            case "goodbye":
                return Goodbye(message.goodbye.reason[:MAX_REASON_CHARS])
            case "welcome":
                welcome = message.welcome
                self._max_model_len = welcome.max_model_len
                return Welcome(
                    welcome.vocab_size, welcome.max_proposal_tokens, welcome.max_distribution_pairs, welcome.max_model_len, welcome.hidden_size
                )
            case _:
                raise MalformedFrame("bad_frame", "a frame must have one of its arms set")

    def _join(self, piece: pb.Begin) -> Iterator[Begin]:
        whole = self._open or piece
        if whole.sequence != piece.sequence:
            raise MalformedFrame("bad_frame", f"sequence {piece.sequence} begins before sequence {whole.sequence} is whole")
        if whole is not piece:
            whole.token_ids.extend(piece.token_ids)
        if len(whole.token_ids) > self._max_model_len:
            raise MalformedFrame("too_long", f"sequence {piece.sequence} begins with more than {self._max_model_len} tokens")
        self._open = whole if piece.more else None
        if not piece.more:
            yield _parse_begin(whole)


def _split_batch(batch: StepBatch) -> Iterator[pb.StepBatch]:
    """Messages that together are the batch: begins and commits over as many as they need, ends with the last."""
    message, num_bytes = pb.StepBatch(step=batch.step), 0
    pieces = (piece for begin in batch.begins for piece in _begin_pieces(begin))
    entries: Iterator[pb.Begin | pb.Commit] = chain(pieces, map(_commit_to_proto, batch.commits))
    for entry in entries:
        size = _BYTES_PER_ID * len(entry.token_ids) + len(entry.hidden.data)
        if num_bytes + size > _MAX_MESSAGE_BYTES and num_bytes:
            yield message
            message, num_bytes = pb.StepBatch(step=batch.step), 0
        if isinstance(entry, pb.Begin):
            message.begins.append(entry)
        else:
            message.commits.append(entry)
        num_bytes += size
    message.ends.extend(pb.End(sequence=end.sequence, reason=_END_REASON_TO_PROTO[end.reason]) for end in batch.ends)
    yield message


def _begin_pieces(begin: Begin) -> Iterator[pb.Begin]:
    starts = range(0, len(begin.token_ids), BEGIN_PIECE_TOKENS) or range(1)
    for start in starts:
        token_ids, more = begin.token_ids[start : start + BEGIN_PIECE_TOKENS], start != starts[-1]
        if start > 0:
            yield pb.Begin(sequence=begin.sequence, token_ids=token_ids, more=more)
            continue
        yield pb.Begin(
            sequence=begin.sequence,
            prompt_length=begin.prompt_length,
            token_ids=token_ids,
            more=more,
            mode=MODE_TO_PROTO[begin.mode],
            sampling=sampling_to_proto(begin.sampling),
            draft_seed=begin.draft_seed,
            window=begin.window,
            suppressed_token_ids=begin.suppressed_ids,
            suppressed_until=begin.suppressed_until,
            hidden=_hidden_to_proto(begin.hidden),
        )


def _parse_begin(message: pb.Begin) -> Begin:
    if message.mode not in MODE_OF:
        raise MalformedFrame("bad_frame", f"begin.mode {message.mode} is unknown")
    try:
        sampling = parse_sampling(message.sampling, _ANY_TOKEN_ID, len(message.sampling.logit_bias))
    except InvalidRequest as error:
        raise MalformedFrame("bad_frame", f"begin.{error}") from error
    return Begin(
        sequence=message.sequence,
        prompt_length=message.prompt_length,
        token_ids=tuple(message.token_ids),
        mode=MODE_OF[message.mode],
        sampling=sampling,
        draft_seed=message.draft_seed,
        window=message.window,
        suppressed_ids=tuple(message.suppressed_token_ids),
        suppressed_until=message.suppressed_until,
        hidden=_parse_hidden(message),
    )


def _commit_to_proto(commit: Commit) -> pb.Commit:
    return pb.Commit(
        sequence=commit.sequence,
        base_length=commit.base_length,
        accepted=commit.accepted,
        token_ids=commit.token_ids,
        window=commit.window,
        rewind=commit.rewind,
        hidden=_hidden_to_proto(commit.hidden),
    )


def _parse_commit(message: pb.Commit) -> Commit:
    hidden = _parse_hidden(message)
    return Commit(message.sequence, message.base_length, message.accepted, tuple(message.token_ids), message.window, message.rewind, hidden)


def _hidden_to_proto(hidden: HiddenState | None) -> pb.HiddenState | None:
    return None if hidden is None else pb.HiddenState(dtype=hidden.dtype, shape=hidden.shape, data=hidden.data)


def _parse_hidden(message: pb.Begin | pb.Commit) -> HiddenState | None:
    if not message.HasField("hidden"):
        return None
    hidden = message.hidden
    shape = tuple(hidden.shape)
    if hidden.dtype not in _NUMBER_BYTES:
        raise MalformedFrame("bad_shape", f"hidden states of type {hidden.dtype[:32]!r} are unknown")
    if len(hidden.data) != prod(shape) * _NUMBER_BYTES[hidden.dtype]:
        raise MalformedFrame("bad_shape", f"a hidden state of shape {list(shape)[:4]} in {hidden.dtype} does not have {len(hidden.data)} bytes")
    return HiddenState(hidden.dtype, shape, hidden.data)


def _parse_end(message: pb.End) -> End:
    return End(message.sequence, _END_REASON_OF.get(message.reason, EndReason.FINISHED))
