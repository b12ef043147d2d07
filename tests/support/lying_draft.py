"""`outrider draft` with a liar for a proposer: `python -m tests.support.lying_draft RATE draft --draft ...`."""

import sys
from unittest import mock

import draft_service.main
from client.cli import main
from draft_service.draft_model import DraftModel
from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from tests.support.liars import LyingProposer

if __name__ == "__main__":
    rate = float(sys.argv[1])

    def make_liar(runner: ModelRunner, allocator: BlockAllocator, max_tokens_beside: int, min_confidence: float) -> LyingProposer:
        model = DraftModel(runner, allocator, max_tokens_beside=max_tokens_beside, min_confidence=min_confidence)
        return LyingProposer(model, rate, runner.model.vocab_size, seed=0)

    with mock.patch.object(draft_service.main, "DraftModel", make_liar):
        main(sys.argv[2:])
