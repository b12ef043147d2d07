"""The KV oracle: what the cache holds for a sequence must be what a fresh prefill of its tokens would have put there."""

import torch

from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence


def assert_kv_matches_fresh_prefill(runner: ModelRunner, sequence: Sequence, allocator: BlockAllocator | None = None, atol: float = 1e-10) -> None:
    """Compares the cached keys and values of positions [0, kv_len) with those of a prefill into other blocks.

    Args:
        runner: whose cache holds the sequence; its count of forward passes is left as it was.
        sequence: kv_len must not exceed its tokens.
        allocator: lends the blocks to prefill into; None: a cache of the oracle's own.
        atol: largest difference allowed.
    """
    block_size = runner.cache.block_size
    num_blocks = -(-sequence.kv_len // block_size)
    assert sequence.kv_len <= len(sequence.token_ids)
    assert sequence.kv_len <= len(sequence.block_table) * block_size
    if num_blocks == 0:
        return
    fresh_runner = ModelRunner(runner.model, num_blocks, block_size) if allocator is None else runner
    fresh_blocks = list(range(num_blocks)) if allocator is None else allocator.allocate(num_blocks)
    num_forwards = fresh_runner.num_forwards
    fresh_runner.forward([Span(sequence.token_ids[: sequence.kv_len], 0, fresh_blocks, 0)])
    fresh_runner.num_forwards = num_forwards
    for layer in range(runner.cache.num_layers):
        for what, cached, fresh in (
            ("keys", runner.cache.keys[layer], fresh_runner.cache.keys[layer]),
            ("values", runner.cache.values[layer], fresh_runner.cache.values[layer]),
        ):
            actual = cached[sequence.block_table[:num_blocks]].flatten(0, 1)[: sequence.kv_len]
            expected = fresh[fresh_blocks].flatten(0, 1)[: sequence.kv_len]
            where = f"{what} of layer {layer}: "
            torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=where.__add__)
    if allocator is not None:
        allocator.release(fresh_blocks)
