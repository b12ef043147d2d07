"""From what a client asks to what the engine computes: the checks that need the prompt's tokens. It knows no protobuf and no tokenizer."""

from collections.abc import Sequence

from shared.errors import InvalidRequest
from shared.rpc.convert_generate import Completion, Limits
from verifier_service.request import Request, Stopping


def build_request(asked: Completion, prompt_ids: Sequence[int], limits: Limits, eos_ids: frozenset[int], request_id: str, seed: int) -> Request:
    """The request for the engine.

    Args:
        asked: checked by `shared.rpc.convert_generate`.
        prompt_ids: of its prompt.
        limits: of this server.
        eos_ids: the model's end-of-sequence ids.
        request_id: used where the client gave none.
        seed: used where the client gave none, uint64.

    Raises:
        InvalidRequest: prompt and output do not fit the model, or the resumed tokens end the completion already.
    """
    room = limits.max_model_len - len(prompt_ids)
    if not prompt_ids:
        raise InvalidRequest("prompt", "must have at least one token")
    if room < 1:
        raise InvalidRequest("prompt", f"has {len(prompt_ids)} tokens; prompt and output together must fit {limits.max_model_len}")
    max_tokens = min(room, asked.max_tokens or room)
    if asked.min_tokens > max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"only {max_tokens} tokens fit after this prompt")
    if len(asked.resume_ids) >= max_tokens:
        raise InvalidRequest("resume_token_ids", f"must be fewer than the {max_tokens} tokens that fit after this prompt")
    stopping = Stopping(max_tokens, asked.min_tokens, frozenset() if asked.ignore_eos else eos_ids, asked.stop_token_ids)
    if not (stopping.eos_ids | stopping.stop_ids).isdisjoint(asked.resume_ids):
        raise InvalidRequest("resume_token_ids", "have a token that ends the completion: there is nothing to resume")
    return Request(
        request_id=asked.request_id or request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=asked.sampling,
        stopping=stopping,
        seed=seed if asked.seed is None else asked.seed,
        resume_ids=asked.resume_ids,
        mode=asked.mode,
        max_draft_tokens=asked.max_draft_tokens,
        preferred_drafter=asked.preferred_drafter,
        priority=asked.priority,
        tenant=asked.tenant,
    )
