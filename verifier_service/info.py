"""What the verifier tells about itself, as values. Who asks, and over what, is not known here."""

from dataclasses import dataclass

from shared.rpc.convert_generate import Limits


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The target model.

    Args:
        name: hub id, directory or alias it was loaded from.
        tokenizer_fingerprint: SHA-256 in hexadecimal.
        dtype: `float64`, `float32` or `bfloat16`.
        device: `cpu` or `cuda:n`.
    """

    name: str
    tokenizer_fingerprint: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """An attached draft service; `capacity` and `sequences` are what it can serve and does serve."""

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
class VerifierInfo:
    """All that GetInfo tells of a verifier.

    Args:
        model: the target.
        limits: of a request; vocabulary, length and modes among them.
        drafters: attached now.
        refused: turned away since the start, newest last, at most 16.
    """

    model: ModelInfo
    limits: Limits
    drafters: tuple[DrafterInfo, ...] = ()
    refused: tuple[RefusedDrafter, ...] = ()
