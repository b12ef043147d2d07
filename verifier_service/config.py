"""Settings of the verifier service. What they mean to the engine is decided there; nothing here knows a model."""

from typing import Literal

from pydantic import ValidationInfo, field_validator

from shared.address import is_loopback
from shared.config import MODEL, SERVING, Address, ModelName, OptionalAddress, OptionalFile, ServiceConfig, setting
from shared.default_model import DEFAULT_TARGET

SPECULATION = "Speculation"
SCHEDULING = "Scheduling and limits"


class VerifierConfig(ServiceConfig):
    """Everything the verifier service is told."""

    target: ModelName = setting(
        DEFAULT_TARGET, f"Target model: hub id, directory, or the alias `{DEFAULT_TARGET}`, which is installed from PyPI.", MODEL
    )
    kv_memory_fraction: float = setting(0.5, "Share of the device's free memory for KV blocks, where `kv_blocks` is 0.", MODEL, ge=0.01, le=0.95)
    max_model_len: int = setting(0, "Longest sequence, prompt and output together; 0 is the model's own limit.", MODEL, ge=0, le=10_000_000)

    listen: Address = setting("127.0.0.1:50051", "Address of `VerifierService`, for clients. Loopback unless told otherwise.", SERVING)
    link: Address = setting(
        "127.0.0.1:50052",
        "Address of `LinkService`, for draft services. Beyond loopback it needs a link token: whoever attaches is shown prompts.",
        SERVING,
    )
    link_token_file: OptionalFile = setting(
        None,
        "File with the token that draft services must show. Needed where the link is reachable from other machines.",
        SERVING,
        "none",
        validate_default=True,
    )
    metrics: OptionalAddress = setting("127.0.0.1:9464", "Address of the Prometheus metrics, at /metrics.", SERVING)

    mode: Literal["coupled", "rejection"] = setting("coupled", "Verification mode of requests that name none.", SPECULATION)
    max_draft_tokens: int = setting(
        16, "Most draft tokens scored in one step for one request, if so many pay; 0 turns speculation off.", SPECULATION, ge=0, le=64
    )
    window: int = setting(
        32,
        "Most tokens that a drafter may be ahead of the committed text. With at most `max_draft_tokens` it does one round at a time and stands still "
        "meanwhile: `outrider up` sets it so.",
        SPECULATION,
        ge=0,
        le=256,
    )
    scorer: Literal["auto", "expanded", "multi_query"] = setting(
        "auto",
        "How guesses are scored: as rows of one token each, or as one group of queries per sequence. Same numbers, different cost; `auto` measures "
        "both at the start.",
        SPECULATION,
    )

    max_num_seqs: int = setting(64, "Most sequences in one step.", SCHEDULING, ge=1, le=4096)
    max_step_tokens: int = setting(2048, "Most tokens in one step, prompts and guesses together.", SCHEDULING, ge=128, le=1_000_000)
    max_prefill_tokens: int = setting(
        0,
        "Most tokens of prompts in one step; a quarter of it while others decode, which bounds how long a long prompt holds up their tokens.",
        SCHEDULING,
        "512 on a CPU, else `max_step_tokens`",
        ge=0,
        le=1_000_000,
    )
    prefix_cache: Literal["on", "off"] = setting(
        "on", "Whether requests of one tenant that begin alike share the KV of what they have in common.", SCHEDULING
    )
    max_queue: int = setting(256, "Most requests that wait for room; beyond it a request is refused at once.", SCHEDULING, ge=0, le=1_000_000)
    max_prompt_bytes: int = setting(1 << 20, "Most bytes of prompt text in a request.", SCHEDULING, ge=1, le=4 << 20)
    stall_timeout_s: float = setting(
        30.0, "Seconds without a sign of life from the engine after which health says NOT_SERVING.", SCHEDULING, ge=1, le=3600
    )

    @field_validator("link_token_file")
    @classmethod
    def _link_beyond_loopback_needs_a_token(cls, path: OptionalFile, info: ValidationInfo) -> OptionalFile:
        link = info.data.get("link")
        if path is None and link is not None and not is_loopback(link):
            raise ValueError(f"the link at {link} is reachable from other machines, so it needs a token: whoever attaches is shown prompts")
        return path
