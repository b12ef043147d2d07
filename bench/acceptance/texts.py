"""Texts that a target has written, as token ids in a file: what acceptance is measured along. They are recorded once and read ever after."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_service.training.writing import Question, answer
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence as CachedSequence
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One text.

    Args:
        prompt_length: tokens before this position are the prompt's.
        token_ids: prompt and answer.
        temperature: of the request; 0 is greedy.
        seed: of the request's noise.
    """

    prompt_length: int
    token_ids: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters."""
        return SamplingParams(temperature=self.temperature)


def load_texts(file: Path) -> list[RecordedText]:
    """Reads what `save_texts` has written."""
    return [RecordedText(**{**record, "token_ids": tuple(record["token_ids"])}) for record in json.loads(file.read_text(encoding="utf-8"))]


def save_texts(texts: Sequence[RecordedText], file: Path) -> None:
    """Writes texts, one on a line."""
    file.write_text("[\n" + ",\n".join(json.dumps(asdict(text)) for text in texts) + "\n]\n", encoding="utf-8")


def record(
    runner: ModelRunner, allocator: BlockAllocator, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, vocab_size: int
) -> list[RecordedText]:
    """The target's own answers, as the verifier would give them without a drafter.

    Args:
        runner: the target.
        allocator: of its KV, with room for all.
        prompts: token ids; the index of each is its seed.
        temperature: of all of them.
        max_tokens: most for each answer.
        vocab_size: ids of the tokenizer.
    """
    questions = [Question(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]
    answers = answer(runner, allocator, questions, max_tokens, vocab_size, frozenset(runner.model.eos_token_ids))
    return [
        RecordedText(len(question.prompt), (*question.prompt, *said.token_ids), temperature, question.seed)
        for question, said in zip(questions, answers, strict=True)
    ]


def head_inputs(runner: ModelRunner, allocator: BlockAllocator, text: RecordedText) -> Tensor:
    """What the target's head reads along a text: [tokens - 1, hidden_size], in row j what token j + 1 was chosen from."""
    kv = CachedSequence(list(text.token_ids[:-1]))
    kv.reserve(len(kv.token_ids), allocator)
    with torch.inference_mode(), head_input(runner.model.model) as read:
        runner.forward([Span(kv.token_ids, 0, kv.block_table, len(kv.token_ids))])
    kv.release(allocator)
    return read[0]
