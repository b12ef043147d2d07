"""A target's own answers to prompts, with what its head read for every token. It knows neither speculators nor files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence as CachedSequence
from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Pick, SamplingParams, TokenRules


@dataclass(frozen=True, slots=True)
class Question:
    """What to answer.

    Args:
        prompt: token ids, at least one.
        temperature: 0 is greedy.
        seed: of the noise, uint64; answers are those of a verifier without a drafter.
    """

    prompt: Sequence[int]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said.

    Args:
        token_ids: [N], the prompt not among them.
        hidden: [N, hidden_size], in row j what the head read when token j was chosen.
    """

    token_ids: tuple[int, ...]
    hidden: Tensor


def answer(
    runner: ModelRunner,
    allocator: BlockAllocator,
    questions: Sequence[Question],
    max_tokens: int,
    vocab_size: int,
    eos_ids: frozenset[int],
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """Lets the target answer, all questions together.

    Args:
        runner: the target.
        allocator: of its KV, with room for all of them.
        questions: at least one.
        max_tokens: most for each.
        vocab_size: ids of the tokenizer.
        eos_ids: what ends an answer.
        on_tokens: told how many tokens a pass has brought.
    """
    writers = [_Writer(question, vocab_size) for question in questions]
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
        done = [writer for writer in active if len(writer.said) == max_tokens or writer.said[-1] in eos_ids]
        for writer in done:
            writer.kv.release(allocator)
        active = [writer for writer in active if writer not in done]
    return [Answer(tuple(writer.said), torch.stack(writer.rows)) for writer in writers]


class _Writer:
    """An answer in the making."""

    def __init__(self, question: Question, vocab_size: int) -> None:
        self.kv = CachedSequence(list(question.prompt))
        rules = TokenRules(SamplingParams(temperature=question.temperature), len(question.prompt), vocab_size)
        self.pick = Pick(rules, noise_key(question.seed), self.kv.token_ids)
        self.rows: list[Tensor] = []
        self.said: list[int] = []

    def span(self) -> Span:
        """The tokens that have no KV yet, with logits for the last."""
        return Span(self.kv.token_ids[self.kv.kv_len :], self.kv.kv_len, self.kv.block_table, 1)

    def add(self, row: Tensor, token_id: int) -> None:
        """Takes what the head read and what came of it."""
        self.kv.kv_len = len(self.kv.token_ids)
        self.kv.token_ids.append(token_id)
        self.rows.append(row.clone())  # a view would keep the whole pass alive
        self.said.append(token_id)
