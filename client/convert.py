"""Requests into protobuf and answers out of it, for the client. It checks only what protobuf cannot carry; the server checks the rest."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from outrider.v1 import generate_pb2, info_pb2

from client.completion import DrafterInfo, DraftServiceInfo, ModelInfo, Part, Prompt, RefusedDrafter, ServiceInfo, Usage
from shared.errors import InvalidRequest
from shared.sampling import Mode

_MODES = {
    Mode.COUPLED: generate_pb2.VERIFICATION_MODE_COUPLED,
    Mode.REJECTION: generate_pb2.VERIFICATION_MODE_REJECTION,
}
_SAMPLING = frozenset(generate_pb2.Sampling.DESCRIPTOR.fields_by_name)
_STOPPING = frozenset(generate_pb2.Stopping.DESCRIPTOR.fields_by_name)
_SPECULATION = frozenset(generate_pb2.Speculation.DESCRIPTOR.fields_by_name)
_ORDER = frozenset({"priority", "tenant"})
_REASONS = {
    generate_pb2.FINISH_REASON_LENGTH: "length",
    generate_pb2.FINISH_REASON_EOS: "eos",
    generate_pb2.FINISH_REASON_STOP_TOKEN: "stop_token",
    generate_pb2.FINISH_REASON_STOP_STRING: "stop_string",
}


def to_request(
    prompt: Prompt, *, mode: Mode | str | None, request_id: str | None, resume_token_ids: Sequence[int], options: Mapping[str, Any]
) -> generate_pb2.GenerateRequest:
    """A request out of Python values.

    Args:
        prompt: text, messages with `role` and `content`, or token ids.
        mode: None leaves it to the server.
        request_id: None leaves it to the server.
        resume_token_ids: tokens that an earlier, broken call already delivered.
        options: fields of `Sampling`, `Stopping` and `Speculation`, `priority` and `tenant`, by name; None leaves one unset.

    Raises:
        TypeError: an option that no message has.
        InvalidRequest: a value that its field cannot carry, e.g. a negative token id.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - _SAMPLING - _STOPPING - _SPECULATION - _ORDER:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    request = generate_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    for path, message, names in (
        ("sampling", request.sampling, _SAMPLING),
        ("stopping", request.stopping, _STOPPING),
        ("speculation", request.speculation, _SPECULATION),
    ):
        for name in given.keys() & names:
            _set(message, name, given[name], f"{path}.{name}")
    for name in given.keys() & _ORDER:
        _set(request, name, given[name], name)
    if mode is not None:
        try:
            request.mode = _MODES[Mode(mode)]
        except ValueError:
            raise InvalidRequest("mode", f"must be {' or '.join(each.value for each in Mode)}; it is {mode!r}") from None
    if request_id is not None:
        _set(request, "request_id", request_id, "request_id")
    _set(request, "resume_token_ids", resume_token_ids, "resume_token_ids")
    return request


def to_part(output: generate_pb2.Output) -> Part:
    """New tokens, as a value."""
    return Part(text=output.text, token_ids=tuple(output.token_ids), accepted=output.accepted)


def to_ending(finished: generate_pb2.Finished) -> tuple[str, str | int | None, Usage]:
    """Why a completion ended, what matched, and what it took."""
    which = finished.WhichOneof("matched")
    matched = None if which is None else finished.stop if which == "stop" else finished.stop_token_id
    usage = Usage(
        prompt_tokens=finished.usage.prompt_tokens,
        generated_tokens=finished.usage.generated_tokens,
        rounds=finished.usage.rounds,
        drafted_tokens=finished.usage.drafted_tokens,
        accepted_tokens=finished.usage.accepted_tokens,
        cached_prompt_tokens=finished.usage.cached_prompt_tokens,
    )
    return _REASONS.get(finished.reason, "unknown"), matched, usage


def to_info(response: info_pb2.GetInfoResponse) -> ServiceInfo:
    """What a service says of itself, as a value."""
    model = response.model
    modes = {number: mode for mode, number in _MODES.items()}
    draft = response.draft_service if response.HasField("draft_service") else None
    return ServiceInfo(
        version=response.version,
        protocol_revision=response.protocol_revision,
        model=ModelInfo(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            dtype=model.dtype,
            device=model.device,
        ),
        limits={field.name: getattr(response.limits, field.name) for field in response.limits.DESCRIPTOR.fields},
        modes=tuple(modes[number] for number in response.modes if number in modes),
        drafters=tuple(
            DrafterInfo(instance_id=each.instance_id, name=each.name, capacity=each.capacity, sequences=each.sequences, suspended=each.suspended)
            for each in response.drafters
        ),
        refused_drafters=tuple(
            RefusedDrafter(instance_id=each.instance_id, name=each.name, reason=each.reason) for each in response.refused_drafters
        ),
        draft_service=None
        if draft is None
        else DraftServiceInfo(
            instance_id=draft.instance_id,
            name=draft.name,
            proposer=draft.proposer,
            link_address=draft.link_address,
            attached=draft.attached,
            detached_reason=draft.detached_reason,
        ),
    )


def _set_prompt(request: generate_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    parts = list(cast("Sequence[Any]", prompt))
    if parts and all(isinstance(part, Mapping) for part in parts):
        for place, message in enumerate(parts):
            if not {"role", "content"} == message.keys():
                raise InvalidRequest(f"chat.messages[{place}]", f"has role and content; it has {', '.join(map(str, message)) or 'nothing'}")
            _set(request.chat.messages.add(), "role", message["role"], f"chat.messages[{place}].role")
            _set(request.chat.messages[-1], "content", message["content"], f"chat.messages[{place}].content")
        return
    request.token_ids.SetInParent()
    _set(request.token_ids, "ids", parts, "token_ids.ids")


def _set(message: Any, name: str, value: Any, path: str) -> None:
    """Set one field of a message; what protobuf refuses becomes an error that names the field."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(path, f"cannot be {value!r}: {error}") from None
