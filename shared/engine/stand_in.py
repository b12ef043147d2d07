"""A pool whose model only takes time: for measuring all that is around a model. It does not know what is measured."""

import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_loader import LoadedModel
from shared.engine.model_runner import ModelRunner
from shared.engine.pool import Pool
from shared.simulation import VOCAB_SIZE, Simulation, next_id

_MAX_MODEL_LEN = 1 << 16
_NUM_BLOCKS = 1 << 15
_CERTAIN = 1e4  # beyond what noise at any allowed temperature makes up for


class StandInRunner(ModelRunner):
    """Sleeps for as long as a pass is said to take, and is certain of every next token. It has no KV, and no weights.

    Args:
        simulation: how long a pass takes.
        sleep: takes seconds.
        clock: monotonic seconds; what a pass really costs here counts towards its time.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        simulation: Simulation,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        max_model_len: int = _MAX_MODEL_LEN,
    ) -> None:
        nothing = cast("PreTrainedModel", torch.nn.Identity())
        self.model = LoadedModel(nothing, "stand-in", VOCAB_SIZE, max_model_len, (), torch.float32, torch.device("cpu"), ())
        self.num_forwards = 0
        self._simulation = simulation
        self._sleep = sleep
        self._clock = clock

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """As a model's, but that a row's logits depend on its token and position alone. [sum of num_logits, vocab] float32."""
        began = self._clock()
        said = [next_id(token_id, span.end - span.num_logits + place + 1) for span in spans for place, token_id in enumerate(_last(span))]
        logits = torch.zeros(len(said), VOCAB_SIZE)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.int64)] = _CERTAIN
        self.num_forwards += 1
        until = began + self._simulation.target_s(sum(len(span.token_ids) for span in spans))
        self._sleep(max(0.0, until - self._clock()))
        return logits


def stand_in_pool(simulation: Simulation, num_blocks: int, block_size: int, max_model_len: int) -> Pool:
    """A pool without a model.

    Args:
        simulation: how long its passes take.
        num_blocks: of KV that is never written; 0 is plenty.
        block_size: tokens per block.
        max_model_len: longest sequence; 0 is whatever the pool holds.
    """
    num_blocks = num_blocks or _NUM_BLOCKS
    longest = min(max_model_len or _MAX_MODEL_LEN, _MAX_MODEL_LEN, num_blocks * block_size)
    runner = StandInRunner(simulation, max_model_len=longest)
    return Pool(runner.model, runner, BlockAllocator(num_blocks, block_size), longest)


def _last(span: Span) -> Sequence[int]:
    return span.token_ids[len(span.token_ids) - span.num_logits :]
