"""A model with a KV pool of its own, sized by a flag or by memory. It does not know what the model is for."""

import os
from dataclasses import dataclass

import torch

from shared.engine.block_allocator import BlockAllocator
from shared.engine.kv_cache import bytes_per_block
from shared.engine.model_loader import LoadedModel, OnProgress, available_memory, fit_blocks, load
from shared.engine.model_runner import ModelRunner
from shared.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How to load a model and how much KV to give it.

    Args:
        name_or_dir: hub id or directory.
        dtype: `auto`, `float64`, `float32` or `bfloat16`.
        device: `cpu` or `cuda[:n]`; `auto` is the first GPU if there is one.
        block_size: tokens per block.
        num_blocks: blocks in the pool; 0 fits them to memory.
        memory_fraction: share of the free memory to use then.
        max_num_seqs: sequences at once.
        max_model_len: longest sequence; 0 is the model's own limit.
        threads: CPU threads; 0 uses every core.
        weights: of the linear layers: `native` as stored, or `int8`, rounded, for a draft only.
    """

    name_or_dir: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    memory_fraction: float
    max_num_seqs: int
    max_model_len: int
    threads: int
    weights: Weights = "native"


@dataclass(frozen=True, slots=True)
class Pool:
    """A model ready to run, the books of its blocks, and the longest sequence that both can hold."""

    model: LoadedModel
    runner: ModelRunner
    allocator: BlockAllocator
    max_model_len: int


def load_pool(config: PoolConfig, on_progress: OnProgress) -> Pool:
    """Loads a model and allocates its KV. Takes a while: call it off the event loop.

    Raises:
        UnsupportedModel: it cannot be found, read, served or fitted; the text says why.
    """
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    model = load(config.name_or_dir, config.dtype, config.device, on_progress, config.weights)
    longest = min(config.max_model_len or model.max_model_len, model.max_model_len)
    num_blocks = config.num_blocks or fit_blocks(
        available_memory(model.device),
        config.memory_fraction,
        bytes_per_block(model.layers, config.block_size, model.dtype),
        config.block_size,
        config.max_num_seqs,
        longest,
    )
    runner = ModelRunner(model, num_blocks, config.block_size)
    # One sequence alone must always fit, whatever was asked for: else it could never run.
    return Pool(model, runner, BlockAllocator(num_blocks, config.block_size), min(longest, num_blocks * config.block_size))
