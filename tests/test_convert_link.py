import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.v1 import link_pb2 as pb

from shared.link import (
    MAX_BATCH_PROPOSALS,
    Begin,
    Capacity,
    Commit,
    Decline,
    Distribution,
    End,
    EndReason,
    FromDrafter,
    FromVerifier,
    Goodbye,
    Heartbeat,
    Hello,
    HiddenState,
    Proposal,
    ProposalBatch,
    Resync,
    StepBatch,
    Welcome,
)
from shared.rpc.convert_link import MalformedFrame, from_speculate_request, to_speculate_request
from shared.rpc.convert_step import PieceJoiner, to_speculate_responses
from shared.sampling import Mode, SamplingParams

_uint64 = st.integers(0, 2**64 - 1)
_uint32 = st.integers(0, 2**32 - 1)
_token_ids = st.lists(_uint32, min_size=1, max_size=8).map(tuple)


@st.composite
def _distributions(draw: st.DrawFn, guess: int) -> Distribution:
    others = draw(st.sets(_uint32.filter(lambda token_id: token_id != guess), max_size=63))
    weights = np.asarray(draw(st.lists(st.floats(1e-3, 1), min_size=len(others) + 1, max_size=len(others) + 1)))
    probabilities = (weights / weights.sum()).astype(np.float32).tolist()
    return Distribution((guess, *others), tuple(probabilities))


@st.composite
def _proposals(draw: st.DrawFn) -> Proposal:
    token_ids = draw(_token_ids)
    certain = draw(st.booleans())
    distributions = () if certain else tuple(draw(_distributions(guess)) for guess in token_ids[:3])
    return Proposal(draw(_uint64), draw(_uint32), draw(_uint64), token_ids if certain else token_ids[:3], distributions)


_from_drafter: st.SearchStrategy[FromDrafter] = st.one_of(
    st.builds(
        Hello,
        _uint32,
        st.just("i" * 128),
        st.just("n"),
        st.just("ab" * 32),
        st.sampled_from([(), (Mode.COUPLED, Mode.REJECTION)]),
        _uint32,
        st.booleans(),
    ),
    st.builds(
        ProposalBatch,
        _uint64,
        st.integers(0, 10**9).map(lambda ns: ns / 1e9),
        st.lists(_proposals(), max_size=3, unique_by=lambda proposal: proposal.sequence).map(tuple),
        st.booleans(),
        st.lists(_uint64, max_size=3).map(tuple),
    ),
    st.builds(Decline, _uint64, st.just("at capacity")),
    st.builds(Capacity, _uint32),
    st.builds(Resync, _uint64),
    st.builds(Heartbeat, _uint64, st.booleans()),
    st.builds(Goodbye, st.just("bye")),
)

_hidden_states = st.none() | st.binary(min_size=1, max_size=9).map(lambda data: HiddenState("bfloat16", (len(data),), data * 2))
_begins = st.builds(
    Begin,
    sequence=_uint64,
    prompt_length=_uint32,
    token_ids=_token_ids,
    mode=st.sampled_from(Mode),
    sampling=st.just(SamplingParams(temperature=0.5, top_k=3, logit_bias=((7, -1.5),))),
    draft_seed=_uint64,
    window=_uint32,
    suppressed_ids=_token_ids,
    suppressed_until=_uint32,
    hidden=_hidden_states,
)
_commits = st.builds(Commit, _uint64, _uint32, _uint32, _token_ids, _uint32, st.booleans(), _hidden_states)
_ends = st.builds(End, _uint64, st.sampled_from(EndReason))
_from_verifier: st.SearchStrategy[FromVerifier] = st.one_of(
    st.builds(Welcome, _uint32, _uint32, _uint32, _uint32, _uint32),
    st.builds(
        StepBatch,
        _uint64,
        st.lists(_begins, max_size=3, unique_by=lambda begin: begin.sequence).map(tuple),
        st.lists(_commits, max_size=3).map(tuple),
        st.lists(_ends, max_size=3).map(tuple),
    ),
    st.builds(Heartbeat, _uint64, st.booleans()),
    st.builds(Goodbye, st.just("bye")),
)


@given(_from_drafter)
def test_what_a_drafter_sends_arrives_as_it_was(frame: FromDrafter) -> None:
    wire = to_speculate_request(frame).SerializeToString()
    assert from_speculate_request(pb.SpeculateRequest.FromString(wire)) == frame


@given(_from_verifier)
def test_what_the_verifier_sends_arrives_as_it_was(frame: FromVerifier) -> None:
    joiner = PieceJoiner(max_model_len=1000)
    (message,) = to_speculate_responses(frame)
    assert joiner.parse(pb.SpeculateResponse.FromString(message.SerializeToString())) == frame


def _proposal(num_tokens: int = 1, **fields: object) -> pb.SpeculateRequest:
    proposal = pb.Proposal(**{"token_ids": range(num_tokens), **fields})  # type: ignore[arg-type]  # field by field of the table below
    return pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[proposal]))


def _sparse(token_ids: list[int], probabilities: list[float] | bytes) -> pb.Distribution:
    raw = probabilities if isinstance(probabilities, bytes) else np.asarray(probabilities, "<f4").tobytes()
    return pb.Distribution(token_ids=token_ids, probabilities=raw)


MALFORMED = [
    (pb.SpeculateRequest(), "bad_frame"),
    (pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[pb.Proposal(sequence=1, token_ids=[1])] * 2)), "bad_frame"),
    (pb.SpeculateRequest(hello=pb.Hello(name="n")), "bad_frame"),
    (pb.SpeculateRequest(hello=pb.Hello(instance_id="i", name="n" * 65)), "bad_frame"),
    (pb.SpeculateRequest(hello=pb.Hello(instance_id="i", name="a\nb")), "bad_frame"),
    (_proposal(0), "bad_shape"),
    (_proposal(65), "too_long"),
    (_proposal(2, distributions=[_sparse([0], [1.0])]), "bad_shape"),
    (_proposal(1, distributions=[_sparse([0], [1.0])] * 2), "bad_shape"),
    (_proposal(1, distributions=[_sparse([0], b"\0\0\0")]), "bad_shape"),
    (_proposal(1, distributions=[_sparse([0, 1], [1.0])]), "bad_shape"),
    (_proposal(1, distributions=[_sparse(list(range(65)), [1 / 65] * 65)]), "too_long"),
    (_proposal(1, distributions=[_sparse([], [])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [0.5, float("nan")])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [0.5, float("inf")])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [1.5, -0.5])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [1.0, 0.0])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [0.0, 1.0])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [0.5, 0.498])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 1], [0.5, 0.502])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([0, 0], [0.5, 0.5])]), "bad_probability"),
    (_proposal(1, distributions=[_sparse([1, 2], [0.5, 0.5])]), "bad_probability"),
]


@pytest.mark.parametrize(("message", "tag"), MALFORMED, ids=[f"{tag}-{index}" for index, (_, tag) in enumerate(MALFORMED)])
def test_a_malformed_frame_is_refused_with_its_kind(message: pb.SpeculateRequest, tag: str) -> None:
    with pytest.raises(MalformedFrame) as refusal:
        from_speculate_request(message)
    assert refusal.value.tag == tag


def test_times_cross_to_the_nanosecond() -> None:
    frame = ProposalBatch(0, 1.5e-08, (), idle=False)
    assert from_speculate_request(to_speculate_request(frame)) == frame


def test_a_batch_of_too_many_proposals_is_refused_before_any_of_them_is_looked_at() -> None:
    most = [pb.Proposal(sequence=number, token_ids=[1]) for number in range(MAX_BATCH_PROPOSALS)]
    taken = from_speculate_request(pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=most)))
    assert isinstance(taken, ProposalBatch)
    assert len(taken.proposals) == MAX_BATCH_PROPOSALS
    # Each of these alone would be a frame of another kind of fault.
    with pytest.raises(MalformedFrame) as refused:
        from_speculate_request(pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[pb.Proposal()] * (MAX_BATCH_PROPOSALS + 1))))
    with pytest.raises(MalformedFrame, match="resting"):
        from_speculate_request(pb.SpeculateRequest(proposals=pb.ProposalBatch(resting=range(MAX_BATCH_PROPOSALS + 1))))
    assert refused.value.tag == "too_long"


def test_a_token_outside_any_vocabulary_is_not_malformed() -> None:
    frame = from_speculate_request(_proposal(0, token_ids=[2**32 - 1]))
    assert isinstance(frame, ProposalBatch)
    assert frame.proposals[0].token_ids == (2**32 - 1,)


def test_a_sum_within_a_thousandth_is_taken() -> None:
    frame = from_speculate_request(_proposal(1, distributions=[_sparse([0, 1], [0.5, 0.4995])]))
    assert isinstance(frame, ProposalBatch)


def test_a_mode_from_the_future_is_a_mode_that_is_not_asked_for() -> None:
    frame = from_speculate_request(pb.SpeculateRequest(hello=pb.Hello(instance_id="i", name="n", modes=[99, 1])))  # type: ignore[list-item]
    assert isinstance(frame, Hello)
    assert frame.modes == (Mode.COUPLED,)


def _begin(num_tokens: int, sequence: int = 1) -> Begin:
    return Begin(sequence, 5, tuple(range(num_tokens)), Mode.COUPLED, SamplingParams(), 9, 4)


@pytest.mark.parametrize("num_tokens", [0, 1, 65_536, 65_537, 200_000])
def test_a_long_begin_crosses_in_pieces_and_is_whole_again(num_tokens: int) -> None:
    batch = StepBatch(3, (_begin(num_tokens), _begin(2, sequence=2)), (Commit(1, num_tokens, 0, (1,), 4),), (End(5, EndReason.FINISHED),))
    messages = list(to_speculate_responses(batch))
    pieces = [piece for message in messages for piece in message.step.begins]
    assert max(len(piece.token_ids) for piece in pieces) <= 65_536
    joiner = PieceJoiner(max_model_len=1 << 20)
    parts = [joiner.parse(message) for message in messages]
    assert parts == [batch]


def test_very_long_begins_are_spread_over_messages_far_below_the_limit() -> None:
    batch = StepBatch(3, tuple(_begin(200_000, sequence=number) for number in range(10)), (Commit(1, 200_000, 0, (1,), 4),))
    messages = list(to_speculate_responses(batch))
    assert len(messages) > 1
    assert max(message.ByteSize() for message in messages) < 4 << 20
    joiner = PieceJoiner(max_model_len=1 << 20)
    parts = [joiner.parse(message) for message in messages]
    assert all(isinstance(part, StepBatch) and part.step == 3 for part in parts)
    begins = tuple(itertools.chain.from_iterable(part.begins for part in parts if isinstance(part, StepBatch)))
    assert begins == batch.begins
    assert isinstance(parts[-1], StepBatch)
    assert parts[-1].commits == batch.commits


@pytest.mark.parametrize(
    ("begins", "tag"),
    [
        ([pb.Begin(sequence=1, token_ids=[1], mode=1, more=True), pb.Begin(sequence=2, token_ids=[1], mode=1)], "bad_frame"),  # type: ignore[arg-type]
        ([pb.Begin(sequence=1, token_ids=[1] * 6, mode=1, more=True), pb.Begin(sequence=1, token_ids=[1] * 5, mode=1)], "too_long"),  # type: ignore[arg-type]
        ([pb.Begin(sequence=1, token_ids=[1])], "bad_frame"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(begins: list[pb.Begin], tag: str) -> None:
    with pytest.raises(MalformedFrame) as refusal:
        PieceJoiner(max_model_len=10).parse(pb.SpeculateResponse(step=pb.StepBatch(begins=begins)))
    assert refusal.value.tag == tag


@given(st.lists(st.integers(0, 151_999), min_size=1, max_size=8), st.integers(0, 32_000), st.integers(0, 2**32))
def test_a_commit_of_up_to_eight_tokens_has_at_most_64_bytes(token_ids: list[int], base_length: int, sequence: int) -> None:
    commit = Commit(sequence, base_length, len(token_ids) - 1, tuple(token_ids), window=32, rewind=True)
    (message,) = to_speculate_responses(StepBatch(0, commits=(commit,)))
    assert message.ByteSize() <= 64


@given(st.lists(st.integers(0, 151_999), min_size=8, max_size=8), st.integers(0, 32_000), _uint64, st.integers(0, 2**32))
def test_a_coupled_proposal_of_eight_tokens_has_at_most_100_bytes(token_ids: list[int], start: int, digest: int, sequence: int) -> None:
    batch = ProposalBatch(10**6, 0.05, (Proposal(sequence, start, digest, tuple(token_ids)),), idle=True)
    assert to_speculate_request(batch).ByteSize() <= 100


def _hidden(dtype: str = "bfloat16", shape: tuple[int, ...] = (3,), num_bytes: int = 6) -> HiddenState:
    return HiddenState(dtype, shape, bytes(range(num_bytes)))


def test_hidden_states_cross_with_begins_and_commits() -> None:
    begin = replace(_begin(70_000), hidden=_hidden("float32", (3,), 12))
    batch = StepBatch(3, (begin,), (Commit(2, 5, 0, (1,), 4, hidden=_hidden()), Commit(3, 5, 0, (1,), 4)))
    joiner = PieceJoiner(max_model_len=1 << 20)
    assert [joiner.parse(message) for message in to_speculate_responses(batch)] == [batch]


def test_many_hidden_states_are_spread_over_messages() -> None:
    hidden = HiddenState("bfloat16", (8192,), bytes(16_384))
    commits = tuple(Commit(number, 5, 0, (1,), 4, hidden=hidden) for number in range(1000))
    batch = StepBatch(3, (), commits, (End(5000, EndReason.FINISHED),))
    messages = list(to_speculate_responses(batch))
    assert len(messages) > 1
    assert max(message.ByteSize() for message in messages) < 5 << 20
    parts = [PieceJoiner(10).parse(message) for message in messages]
    assert tuple(itertools.chain.from_iterable(part.commits for part in parts if isinstance(part, StepBatch))) == commits
    assert [len(part.ends) for part in parts if isinstance(part, StepBatch)] == [0] * (len(parts) - 1) + [1]


@pytest.mark.parametrize(
    "hidden", [_hidden("int8", (3,), 3), _hidden("bfloat16", (3,), 5), _hidden("float32", (), 0), _hidden("float64", (1 << 20, 1 << 20), 8)]
)
def test_a_hidden_state_whose_bytes_do_not_fit_its_shape_is_refused(hidden: HiddenState) -> None:
    [message] = to_speculate_responses(StepBatch(3, (), (Commit(2, 5, 0, (1,), 4, hidden=hidden),)))
    with pytest.raises(MalformedFrame) as caught:
        PieceJoiner(10).parse(message)
    assert caught.value.tag == "bad_shape"
