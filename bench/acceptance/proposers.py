"""The proposers that are measured, and their target, in float32: so small a figure as 0.01 is not to hang on rounding."""

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from bench.acceptance.texts import RecordedText, head_inputs
from draft_service.draft_model import DraftModel
from draft_service.ngram import NgramProposer
from draft_service.proposer import Proposer
from draft_service.speculator_loader import DEFAULT_SPECULATOR, load_proposer
from shared.default_model import DEFAULT_TARGET, resolve
from shared.engine.pool import Pool, PoolConfig, load_pool

PROPOSERS = ("ngram", "speculator", "target")
NUM_GUESSES = 4
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1024


@cache
def target() -> Pool:
    """The default target."""
    return load_pool(PoolConfig(resolve(DEFAULT_TARGET), "float32", "auto", _BLOCK_SIZE, _NUM_BLOCKS, 0.5, 64, 0, 0), lambda _, __: None)


def proposer(name: str) -> Proposer:
    """One of `PROPOSERS`; the control is a draft model that is the target itself."""
    if name == "ngram":
        return NgramProposer()
    if name == "speculator":
        return load_proposer(DEFAULT_SPECULATOR, "", "float32", "cpu", 0, "native")[0]
    return DraftModel(target().runner, target().allocator)


def rows(texts: Sequence[RecordedText]) -> list[Tensor]:
    """What the target's head reads along each text."""
    return [head_inputs(target().runner, target().allocator, text) for text in texts]
