"""What a speculator learns from: text that the target itself writes, and what its head read for every token. It knows no speculator."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence as CachedSequence
from shared.noise import derive_key, noise_key
from shared.picking import pick_tokens
from shared.sampling import Pick, SamplingParams, TokenRules

# Both ends of what requests ask for: a speculator is to foresee greedy text too.
_TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Recording:
    """Texts, one behind the other.

    Args:
        hidden: [N, hidden_size], in row j what the head read when token j was chosen.
        token_ids: [N] int64, the chosen tokens; prompts are not among them.
        lengths: of the texts, sum N.
    """

    hidden: Tensor
    token_ids: Tensor
    lengths: tuple[int, ...]

    def save(self, file: Path) -> None:
        """Writes it; the file appears when it is whole."""
        partial = file.with_suffix(".partial")
        save_file({"hidden": self.hidden, "token_ids": self.token_ids.to(torch.int32), "lengths": torch.tensor(self.lengths)}, partial)
        partial.replace(file)

    @classmethod
    def load(cls, file: Path) -> "Recording":
        """Reads what `save` has written."""
        tensors = load_file(file)
        return cls(tensors["hidden"], tensors["token_ids"].to(torch.int64), tuple(tensors["lengths"].tolist()))


def record(
    runner: ModelRunner,
    allocator: BlockAllocator,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    eos_ids: frozenset[int],
    vocab_size: int,
    seed: int,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Lets the target continue prompts, all together, each at one of several temperatures.

    Args:
        runner: the target.
        allocator: of its KV, with room for all of them.
        prompts: token ids.
        max_tokens: most for each.
        eos_ids: what ends a text.
        vocab_size: ids of the tokenizer.
        seed: of the draws, uint64.
        on_tokens: told how many tokens a pass has brought.
    """
    rules = [TokenRules(SamplingParams(temperature=temperature), 0, vocab_size) for temperature in _TEMPERATURES]
    writers = [_Writer(list(prompt), rules[index % len(rules)], noise_key(derive_key(seed, "text", index))) for index, prompt in enumerate(prompts)]
    active = list(writers)
    while active:
        for writer in active:
            writer.kv.reserve(len(writer.kv.token_ids), allocator)
        with head_input(runner.model.model) as read:
            logits = runner.forward([writer.span() for writer in active])
        picked = pick_tokens(logits, [writer.pick for writer in active]).tolist()
        for writer, row, token_id in zip(active, read[0], picked, strict=True):
            writer.add(row, token_id)
        on_tokens(len(active))
        for writer in active:
            if len(writer.said) == max_tokens or writer.said[-1] in eos_ids:
                writer.kv.release(allocator)
                writer.is_done = True
        active = [writer for writer in active if not writer.is_done]
    return Recording(
        torch.stack([row for writer in writers for row in writer.rows]),
        torch.tensor([token_id for writer in writers for token_id in writer.said]),
        tuple(len(writer.said) for writer in writers),
    )


def batches(prompts: Sequence[Sequence[int]], size: int, seed: int) -> Iterator[list[Sequence[int]]]:
    """Batches of prompts without end, in an order of their own; all come up before one comes again."""
    order = random.Random(seed)
    waiting: list[Sequence[int]] = []
    while True:
        while len(waiting) < size:
            waiting += order.sample(prompts, len(prompts))
        yield waiting[:size]
        del waiting[:size]


def most_frequent(recordings: Sequence[Recording], count: int, vocab_size: int) -> Tensor | None:
    """The ids that texts have most often, ascending, [count] int64; None for a `count` of 0 or of the whole vocabulary."""
    if not 0 < count < vocab_size:
        return None
    occurrences = torch.bincount(torch.cat([each.token_ids for each in recordings]), minlength=vocab_size)
    chosen: Tensor = occurrences.argsort(descending=True, stable=True)[:count].sort().values
    return chosen


class _Writer:
    """A text in the making."""

    def __init__(self, prompt: list[int], rules: TokenRules, key: int) -> None:
        self.kv = CachedSequence(prompt)
        self.pick = Pick(rules, key, self.kv.token_ids)
        self.rows: list[Tensor] = []
        self.said: list[int] = []
        self.is_done = False

    def span(self) -> Span:
        """The tokens that have no KV yet, with logits for the last."""
        return Span(self.kv.token_ids[self.kv.kv_len :], self.kv.kv_len, self.kv.block_table, 1)

    def add(self, row: Tensor, token_id: int) -> None:
        """Takes what the head read and what came of it."""
        self.kv.kv_len = len(self.kv.token_ids)
        self.kv.token_ids.append(token_id)
        self.rows.append(row.clone())
        self.said.append(token_id)
