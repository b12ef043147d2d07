"""Settings of the draft service. Which proposer they lead to is derived here; nothing here knows a model."""

import socket
import uuid
from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from shared.config import MODEL, SERVING, Accepts, Address, DisplayName, OptionalAddress, OptionalFile, ServiceConfig, setting

DRAFTING = "Drafting"

DraftName = Annotated[str, Accepts("a hub id or directory, or empty for none")]


def _machine_name() -> str:
    return "".join(character if character.isalnum() or character in "._-" else "-" for character in socket.gethostname())[:64] or "drafter"


class DraftConfig(ServiceConfig):
    """Everything the draft service is told."""

    draft: DraftName = setting("", "Draft model. Without one, guesses are looked up in the text itself (n-grams).", DRAFTING, "none")
    speculator: DraftName = setting(
        "",
        "MLP speculator: small layers that foresee a few tokens from what the target's head reads. It takes the place of a draft model.",
        DRAFTING,
        "none",
    )
    speculator_target: DraftName = setting(
        "",
        "Model whose embedding and head a speculator shares that has none of its own.",
        DRAFTING,
        "what the speculator's `config.json` names as `target`",
    )
    ngram_first: Literal["on", "off"] = setting(
        "off",
        "Look guesses up in the text before the draft model or the speculator is asked, which then makes those that are not found."
        " Requests in rejection mode are not affected: there it would bias their text.",
        DRAFTING,
    )
    ngram_min: int = setting(2, "Shortest n-gram that is looked up.", DRAFTING, ge=1, le=16)
    ngram_max: int = setting(4, "Longest n-gram that is looked up; the longest match wins.", DRAFTING, ge=1, le=16)
    min_confidence: float = setting(
        0.0,
        "A draft model that is less sure of a guess adds none after it until the next commit; 0 never stops. It is its share in the noisy race for"
        " the token. Requests in rejection mode are not affected: there it would bias their text.",
        DRAFTING,
        ge=0,
        le=1,
    )
    capacity: int = setting(64, "Most sequences to draft for at once.", DRAFTING, ge=1, le=4096)

    weights: Literal["native", "int8"] = setting(
        "native",
        "Weights of the draft model's linear layers: as stored, or rounded to 8 bits when it is loaded (CPU only). Rounding costs no exactness, only"
        " a little acceptance: guesses are verified.",
        MODEL,
    )
    kv_memory_fraction: float = setting(0.2, "Share of the device's free memory for KV blocks, where `kv_blocks` is 0.", MODEL, ge=0.01, le=0.95)

    verifier: Address = setting("127.0.0.1:50051", "Address of `VerifierService`: where `Generate` calls are passed on to.", SERVING)
    link: Address = setting("127.0.0.1:50052", "Address of the verifier's `LinkService`, to attach to.", SERVING)
    link_token_file: OptionalFile = setting(None, "File with the token that the verifier's link asks for.", SERVING, "none")
    listen: Address = setting("127.0.0.1:50061", "Address of `DraftService`, for clients nearby. Loopback unless told otherwise.", SERVING)
    metrics: OptionalAddress = setting("127.0.0.1:9465", "Address of the Prometheus metrics, at /metrics.", SERVING)
    name: DisplayName = setting(_machine_name, "Name for people, shown by `outrider info`.", SERVING, "the machine's name")
    instance_id: DisplayName = setting(
        lambda: uuid.uuid4().hex,
        "Name for the verifier: two that are attached under one name replace each other.",
        SERVING,
        "random for each process",
    )

    @field_validator("ngram_max")
    @classmethod
    def _ngram_range_is_not_empty(cls, longest: int, info: ValidationInfo) -> int:
        shortest = info.data.get("ngram_min")
        if shortest is not None and longest < shortest:
            raise ValueError(f"must not be below ngram-min; it is {longest}, and ngram-min is {shortest}")
        return longest

    @field_validator("speculator")
    @classmethod
    def _there_is_one_model(cls, speculator: str, info: ValidationInfo) -> str:
        if speculator and info.data.get("draft"):
            raise ValueError("cannot be given beside a draft model: one of them makes the guesses")
        return speculator

    @property
    def proposer(self) -> Literal["ngram", "model", "speculator"]:
        """What makes the guesses: lookup where neither a draft model nor a speculator is given."""
        if self.speculator:
            return "speculator"
        return "model" if self.draft else "ngram"
