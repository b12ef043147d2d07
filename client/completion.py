"""What a client gets back, as values: parts while they come, and the whole at the end. Nothing here knows protobuf or a connection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.sampling import Mode

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of one step of the verifier; never retracted.

    Args:
        text: whole characters only; empty while a character or a possible stop string is incomplete.
        token_ids: the ids are authoritative, their text may come in a later part.
        accepted: how many of the ids, from the first, are accepted draft tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion, as the verifier counted them.

    Args:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens generated, resumed ones included.
        rounds: verifications with at least one draft token.
        drafted_tokens: draft tokens scored, up to the one that ended the request.
        accepted_tokens: of those, the accepted ones.
        cached_prompt_tokens: tokens of the prompt that were not computed, because an earlier request of the same tenant had begun with them.
    """

    prompt_tokens: int
    generated_tokens: int
    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    cached_prompt_tokens: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted / rounds: tokens per verification with drafts, the target's own included; None without such a round."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a completion took, on the client's clock.

    Args:
        ttft_s: from the call to the first token; None if there was none.
        total_s: from the call to the end.
        received_tokens: tokens that came in this call.
    """

    ttft_s: float | None
    total_s: float
    received_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Received tokens over the whole time, prompt processing included."""
        return self.received_tokens / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that has ended.

    Args:
        request_id: its name in the server's logs and errors.
        text: all text.
        token_ids: all ids.
        prompt_token_ids: the prompt as the verifier tokenised it.
        seed: in use, given or drawn; with it the same request gives the same text.
        reason: `length`, `eos`, `stop_token` or `stop_string`.
        matched: the stop string, or the stop or end-of-sequence token, if that was why.
        usage: token counts.
        timings: on the client's clock.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    seed: int
    reason: str
    matched: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The target model."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """An attached draft service, as the verifier sees it."""

    instance_id: str
    name: str
    capacity: int
    sequences: int
    suspended: bool


@dataclass(frozen=True, slots=True)
class RefusedDrafter:
    """A draft service that was turned away, and why."""

    instance_id: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class DraftServiceInfo:
    """The draft service that answered, if it was one."""

    instance_id: str
    name: str
    proposer: str
    link_address: str
    attached: bool
    detached_reason: str


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What a service runs and takes.

    Args:
        limits: largest allowed value of each limited part of a request, by the names of `Limits` in info.proto.
    """

    version: str
    protocol_revision: int
    model: ModelInfo
    modes: tuple[Mode, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    drafters: tuple[DrafterInfo, ...] = ()
    refused_drafters: tuple[RefusedDrafter, ...] = ()
    draft_service: DraftServiceInfo | None = None
