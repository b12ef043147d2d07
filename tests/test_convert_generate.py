import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.v1 import generate_pb2 as pb

from shared.errors import InvalidRequest
from shared.rpc.convert_generate import Limits, Message, parse_request, parse_sampling, sampling_to_proto
from shared.sampling import Mode, SamplingParams
from verifier_service.admission import build_request
from verifier_service.request import Request

LIMITS = Limits(vocab_size=100, max_model_len=64, max_prompt_bytes=50, max_draft_tokens=8)
EOS = frozenset({2})


def _request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "hello", **fields})  # type: ignore[arg-type]  # field by field of the table below


def _sampling(**fields: float | int | dict[int, float]) -> pb.GenerateRequest:
    return _request(sampling=pb.Sampling(**fields))  # type: ignore[arg-type]


def _stopping(**fields: object) -> pb.GenerateRequest:
    return _request(stopping=pb.Stopping(**fields))  # type: ignore[arg-type]


def _ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


BAD = [
    (pb.GenerateRequest(), "prompt"),
    (_request(text=""), "text"),
    (_request(text="ü" * 26), "text"),
    (_request(chat=pb.ChatMessages()), "chat.messages"),
    (_request(chat=pb.ChatMessages(messages=[pb.ChatMessage(content="hi")])), "chat.messages[0].role"),
    (_request(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x" * 25)] * 2)), "chat.messages"),
    (_request(token_ids=_ids()), "token_ids.ids"),
    (_request(token_ids=_ids(5, 100)), "token_ids.ids[1]"),
    (_request(token_ids=_ids(*[1] * 64)), "token_ids.ids"),
    *[(_sampling(temperature=value), "sampling.temperature") for value in (-1, math.nan, math.inf, 101)],
    *[(_sampling(top_p=value), "sampling.top_p") for value in (0, 1.5, math.nan, -0.5)],
    *[(_sampling(min_p=value), "sampling.min_p") for value in (-0.1, 1.1, math.nan)],
    *[(_sampling(repetition_penalty=value), "sampling.repetition_penalty") for value in (0, 1e-42, -1, 11, math.nan)],
    *[(_sampling(presence_penalty=value), "sampling.presence_penalty") for value in (-2.5, 3, math.nan)],
    *[(_sampling(frequency_penalty=value), "sampling.frequency_penalty") for value in (-2.5, 3, -math.inf)],
    (_sampling(logit_bias={100: 1.0}), "sampling.logit_bias"),
    *[(_sampling(logit_bias={1: value}), "sampling.logit_bias") for value in (-101, 101, math.nan, math.inf)],
    (_stopping(max_tokens=0), "stopping.max_tokens"),
    (_stopping(max_tokens=3, min_tokens=4), "stopping.min_tokens"),
    (_stopping(stop=["x"] * 17), "stopping.stop"),
    (_stopping(stop=["a", ""]), "stopping.stop[1]"),
    (_stopping(stop=["x" * 257]), "stopping.stop[0]"),
    (_stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids"),
    (_stopping(stop_token_ids=[1, 100]), "stopping.stop_token_ids[1]"),
    (_request(request_id="a b"), "request_id"),
    *[(_request(priority=value), "priority") for value in (-101, 101, -(2**31))],
    *[(_request(tenant=text), "tenant") for text in ("a b", "ü", "a\n", "x" * 65)],
    (_request(request_id="x" * 129), "request_id"),
    (_request(request_id="x\n"), "request_id"),
    (_request(resume_token_ids=[100]), "resume_token_ids[0]"),
    (_request(resume_token_ids=[1, 3], stopping=pb.Stopping(max_tokens=2)), "resume_token_ids"),
    (_request(mode=7), "mode"),
    (_request(speculation=pb.Speculation(max_draft_tokens=9)), "speculation.max_draft_tokens"),
    (_request(speculation=pb.Speculation(preferred_drafter="")), "speculation.preferred_drafter"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{field}-{index}" for index, (_, field) in enumerate(BAD)])
def test_bad_input_is_refused_with_the_field(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_request(request_, LIMITS)
    assert refusal.value.field == field


def test_too_many_biases_are_refused() -> None:
    limits = Limits(vocab_size=5000, max_model_len=64)
    with pytest.raises(InvalidRequest, match="at most 1024"):
        parse_request(_sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), limits)


def test_a_mode_that_is_not_offered_is_refused() -> None:
    limits = Limits(vocab_size=100, max_model_len=64, modes=(Mode.COUPLED,))
    with pytest.raises(InvalidRequest, match="coupled"):
        parse_request(_request(mode=pb.VERIFICATION_MODE_REJECTION), limits)


def test_what_is_unset_has_its_default() -> None:
    asked = parse_request(_request(), LIMITS)
    assert asked.sampling == SamplingParams()
    assert (asked.prompt, asked.mode, asked.max_draft_tokens, asked.max_tokens, asked.min_tokens) == ("hello", Mode.COUPLED, 8, None, 0)
    assert (asked.stop_strings, asked.stop_token_ids, asked.ignore_eos, asked.resume_ids) == ((), frozenset(), False, ())
    assert (asked.seed, asked.request_id, asked.preferred_drafter) == (None, None, None)


def test_zero_is_not_unset() -> None:
    asked = parse_request(_request(sampling=pb.Sampling(temperature=0, seed=0), speculation=pb.Speculation(max_draft_tokens=0)), LIMITS)
    assert (asked.sampling.temperature, asked.seed, asked.max_draft_tokens) == (0.0, 0, 0)
    assert asked.sampling.is_greedy


def test_edges_of_the_ranges_are_taken() -> None:
    sampling = pb.Sampling(temperature=100, top_p=1, min_p=1, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2, logit_bias={99: -100})
    stopping = pb.Stopping(max_tokens=1, min_tokens=1, stop=["x" * 256] * 16, stop_token_ids=[99] * 64)
    asked = parse_request(pb.GenerateRequest(token_ids=_ids(*[99] * 63), sampling=sampling, stopping=stopping, request_id="x" * 128), LIMITS)
    assert asked.prompt == (99,) * 63
    assert asked.sampling.logit_bias == ((99, -100.0),)


def test_messages_are_kept_in_order() -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="system", content=""), pb.ChatMessage(role="user", content="hi")])
    assert parse_request(_request(chat=chat), LIMITS).prompt == (Message("system", ""), Message("user", "hi"))


def _float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


@given(
    st.builds(
        SamplingParams,
        temperature=_float32(0, 100),
        top_k=st.integers(0, 2**32 - 1),
        top_p=_float32(2**-20, 1),
        min_p=_float32(0, 1),
        repetition_penalty=_float32(2**-6, 10),
        presence_penalty=_float32(-2, 2),
        frequency_penalty=_float32(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, 99), _float32(-100, 100), max_size=5).map(lambda bias: tuple(sorted(bias.items()))),
    )
)
def test_sampling_crosses_the_wire_unchanged(sampling: SamplingParams) -> None:
    message = pb.Sampling.FromString(sampling_to_proto(sampling).SerializeToString())
    assert parse_sampling(message, 100, 1024) == sampling


def test_default_sampling_costs_no_bytes() -> None:
    assert sampling_to_proto(SamplingParams()).ByteSize() == 0


def _admit(request: pb.GenerateRequest, num_prompt_tokens: int) -> Request:
    return build_request(parse_request(request, LIMITS), [7] * num_prompt_tokens, LIMITS, EOS, "made", 1234)


def test_max_tokens_is_what_fits_the_model() -> None:
    assert _admit(_request(), 60).stopping.max_tokens == 4
    assert _admit(_stopping(max_tokens=100), 60).stopping.max_tokens == 4
    assert _admit(_stopping(max_tokens=3), 60).stopping.max_tokens == 3


def test_seed_and_id_are_the_requests_own_or_the_servers() -> None:
    made, own = _admit(_request(), 1), _admit(_request(request_id="own", sampling=pb.Sampling(seed=0)), 1)
    assert (made.request_id, made.seed, own.request_id, own.seed) == ("made", 1234, "own", 0)


def test_end_of_sequence_is_ignored_on_request() -> None:
    assert _admit(_request(), 1).stopping.eos_ids == EOS
    assert _admit(_stopping(ignore_eos=True), 1).stopping.eos_ids == frozenset()


@pytest.mark.parametrize(
    ("ask", "num_prompt_tokens", "field"),
    [
        (_request, 64, "prompt"),
        (_request, 0, "prompt"),
        (lambda: _stopping(min_tokens=5), 60, "stopping.min_tokens"),
        (lambda: _request(resume_token_ids=[1, 3, 4, 5]), 60, "resume_token_ids"),
        (lambda: _request(resume_token_ids=[1, 2]), 10, "resume_token_ids"),
        (lambda: _request(resume_token_ids=[1, 9], stopping=pb.Stopping(stop_token_ids=[9])), 10, "resume_token_ids"),
    ],
)
def test_what_does_not_fit_after_the_prompt_is_refused(ask: Callable[[], pb.GenerateRequest], num_prompt_tokens: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _admit(ask(), num_prompt_tokens)
    assert refusal.value.field == field
