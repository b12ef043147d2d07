"""GenerateRequest as our own values, checked at the boundary: the one place for both doors.

Everything that can be refused without a tokenizer or an engine is refused here, with the path of the field. What needs the tokens is
`verifier_service.admission`; nothing here knows how many tokens a text has.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import generate_pb2 as pb

from shared.errors import InvalidRequest
from shared.sampling import Mode, SamplingParams

MODE_OF = {pb.VERIFICATION_MODE_COUPLED: Mode.COUPLED, pb.VERIFICATION_MODE_REJECTION: Mode.REJECTION}
MODE_TO_PROTO = {mode: value for value, mode in MODE_OF.items()}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TENANT = re.compile(r"[A-Za-z0-9._:-]{0,64}")
_MAX_DRAFTER_NAME_CHARS = 128
_MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for; told by GetInfo.

    Args:
        vocab_size: ids of the tokenizer; requests may name ids below this.
        max_model_len: longest sequence, prompt and output together, in tokens.
        max_prompt_bytes: of text or of all messages together.
        max_draft_tokens: most draft tokens scored in one step for one request; what a request gets that names none.
        modes: those that are offered; the first is the default.
    """

    vocab_size: int
    max_model_len: int
    max_prompt_bytes: int = 1 << 20
    max_draft_tokens: int = 8
    modes: tuple[Mode, ...] = (Mode.COUPLED, Mode.REJECTION)
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What a client asks for, checked as far as it can be without a tokenizer.

    Args:
        prompt: text, messages (a tuple of `Message`) or token ids (a tuple of `int`, all of them in the vocabulary).
        sampling: values are exact float32, so that both services compute with the same.
        max_tokens: None is whatever fits the model.
        seed: uint64; None is one drawn at random.
        request_id: None is one made by the server.
        priority: -100..100, higher first.
        tenant: whose it is; "" is the one of all who name none.
    """

    prompt: str | tuple[Message, ...] | tuple[int, ...]
    sampling: SamplingParams
    mode: Mode
    max_draft_tokens: int
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    preferred_drafter: str | None = None
    request_id: str | None = None
    resume_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""


def is_request_id(text: str) -> bool:
    """Whether it may name a request: 1 to 128 characters of `A-Z a-z 0-9 . _ : -`."""
    return _REQUEST_ID.fullmatch(text) is not None


def parse_request(request: pb.GenerateRequest, limits: Limits) -> Completion:
    """Check a request and turn it into our own values.

    Raises:
        InvalidRequest: a field is wrong; names it by its path in generate.proto.
    """
    stopping, speculation = request.stopping, request.speculation
    if request.request_id:
        _check(is_request_id(request.request_id), "request_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    _check(abs(request.priority) <= _MAX_PRIORITY, "priority", f"must be in [-{_MAX_PRIORITY}, {_MAX_PRIORITY}]; it is {request.priority}")
    _check(_TENANT.fullmatch(request.tenant) is not None, "tenant", "must be at most 64 characters of A-Z a-z 0-9 . _ : -")
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    _check(max_tokens != 0, "stopping.max_tokens", "must be at least 1; leave it unset for as many tokens as fit the model")
    if max_tokens is not None:
        _check(stopping.min_tokens <= max_tokens, "stopping.min_tokens", f"must not be above max_tokens, which is {max_tokens}")
        _check(len(request.resume_token_ids) < max_tokens, "resume_token_ids", f"must be fewer than max_tokens, which is {max_tokens}")
    _check(len(request.resume_token_ids) < limits.max_model_len, "resume_token_ids", f"must fit the model's {limits.max_model_len} tokens")
    max_draft_tokens = speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else limits.max_draft_tokens
    _check(max_draft_tokens <= limits.max_draft_tokens, "speculation.max_draft_tokens", f"must be at most {limits.max_draft_tokens}")
    preferred = speculation.preferred_drafter if speculation.HasField("preferred_drafter") else None
    if preferred is not None:
        _check(
            1 <= len(preferred) <= _MAX_DRAFTER_NAME_CHARS, "speculation.preferred_drafter", f"must have 1 to {_MAX_DRAFTER_NAME_CHARS} characters"
        )
    return Completion(
        prompt=_parse_prompt(request, limits),
        sampling=parse_sampling(request.sampling, limits.vocab_size, limits.max_logit_bias),
        mode=_parse_mode(request.mode, limits),
        max_draft_tokens=max_draft_tokens,
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_strings=_parse_stop_strings(stopping.stop, limits),
        stop_token_ids=_parse_stop_ids(stopping.stop_token_ids, limits),
        ignore_eos=stopping.ignore_eos,
        seed=request.sampling.seed if request.sampling.HasField("seed") else None,
        preferred_drafter=preferred,
        request_id=request.request_id or None,
        resume_ids=_parse_ids(request.resume_token_ids, "resume_token_ids", limits),
        priority=request.priority,
        tenant=request.tenant,
    )


def parse_sampling(sampling: pb.Sampling, vocab_size: int, max_logit_bias: int) -> SamplingParams:
    """Check sampling parameters; also those that cross the link.

    Raises:
        InvalidRequest: one is out of its range, or not a number.
    """
    _check(len(sampling.logit_bias) <= max_logit_bias, "sampling.logit_bias", f"must have at most {max_logit_bias} entries")
    for token_id, bias in sampling.logit_bias.items():
        _check(token_id < vocab_size, "sampling.logit_bias", f"token id {token_id} is not in the vocabulary of {vocab_size}")
        _check(-100 <= bias <= 100, "sampling.logit_bias", f"the bias of token {token_id} must be in [-100, 100]; it is {bias:g}")
    top_p = _in_range(sampling, "top_p", 1.0, 0, 1)
    _check(top_p > 0, "sampling.top_p", "must be in (0, 1]; it is 0")
    return SamplingParams(
        temperature=_in_range(sampling, "temperature", 1.0, 0, 100),
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=_in_range(sampling, "min_p", 0.0, 0, 1),
        repetition_penalty=_in_range(sampling, "repetition_penalty", 1.0, 0.01, 10),
        presence_penalty=_in_range(sampling, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_in_range(sampling, "frequency_penalty", 0.0, -2, 2),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def sampling_to_proto(sampling: SamplingParams) -> pb.Sampling:
    """The inverse of `parse_sampling`; fields at their default stay off the wire."""
    message, default = pb.Sampling(logit_bias=dict(sampling.logit_bias)), SamplingParams()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != getattr(default, name):
            setattr(message, name, getattr(sampling, name))
    return message


def _parse_prompt(request: pb.GenerateRequest, limits: Limits) -> str | tuple[Message, ...] | tuple[int, ...]:
    match request.WhichOneof("prompt"):
        case "text":
            _check(request.text != "", "text", "must not be empty")
            _check_bytes(len(request.text.encode()), "text", limits)
            return request.text
        case "chat":
            messages = tuple(Message(message.role, message.content) for message in request.chat.messages)
            _check(bool(messages), "chat.messages", "must have at least one message")
            for index, message in enumerate(messages):
                _check(message.role != "", f"chat.messages[{index}].role", "must not be empty")
            _check_bytes(sum(len(message.role.encode()) + len(message.content.encode()) for message in messages), "chat.messages", limits)
            return messages
        case "token_ids":
            _check(bool(request.token_ids.ids), "token_ids.ids", "must have at least one token id")
            most = limits.max_model_len - 1
            _check(len(request.token_ids.ids) <= most, "token_ids.ids", f"must be at most {most} tokens, so that one more fits the model")
            return _parse_ids(request.token_ids.ids, "token_ids.ids", limits)
        case _:
            raise InvalidRequest("prompt", "one of text, chat and token_ids must be set")


def _parse_mode(value: int, limits: Limits) -> Mode:
    if value == pb.VERIFICATION_MODE_UNSPECIFIED:
        return limits.modes[0]
    mode = MODE_OF.get(pb.VerificationMode.ValueType(value))
    if mode is None or mode not in limits.modes:
        offered = ", ".join(offer.value for offer in limits.modes)
        raise InvalidRequest("mode", f"must be one that this server offers: {offered}")
    return mode


def _parse_stop_strings(strings: Sequence[str], limits: Limits) -> tuple[str, ...]:
    _check(len(strings) <= limits.max_stop_strings, "stopping.stop", f"must be at most {limits.max_stop_strings} strings")
    for index, string in enumerate(strings):
        _check(
            1 <= len(string) <= limits.max_stop_string_chars, f"stopping.stop[{index}]", f"must have 1 to {limits.max_stop_string_chars} characters"
        )
    return tuple(strings)


def _parse_stop_ids(ids: Sequence[int], limits: Limits) -> frozenset[int]:
    _check(len(ids) <= limits.max_stop_token_ids, "stopping.stop_token_ids", f"must be at most {limits.max_stop_token_ids} ids")
    return frozenset(_parse_ids(ids, "stopping.stop_token_ids", limits))


def _parse_ids(ids: Sequence[int], field: str, limits: Limits) -> tuple[int, ...]:
    if ids and max(ids) >= limits.vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= limits.vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"token id {ids[index]} is not in the vocabulary of {limits.vocab_size}")
    return tuple(ids)


def _in_range(sampling: pb.Sampling, name: str, default: float, low: float, high: float) -> float:
    value: float = getattr(sampling, name) if sampling.HasField(name) else default  # type: ignore[arg-type]  # the stub takes literals only
    _check(math.isfinite(value) and low <= value <= high, f"sampling.{name}", f"must be a number in [{low}, {high}]; it is {value:g}")
    return value


def _check_bytes(num_bytes: int, field: str, limits: Limits) -> None:
    _check(num_bytes <= limits.max_prompt_bytes, field, f"must be at most {limits.max_prompt_bytes} bytes; it is {num_bytes}")


def _check(holds: bool, field: str, sentence: str) -> None:
    if not holds:
        raise InvalidRequest(field, sentence)
