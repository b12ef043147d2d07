"""What a speculator learns from: text that the target itself writes, and what its head read for every token. It knows no speculator."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.training.writing import Answer, Question
from shared.noise import derive_key

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


def record(answers: Sequence[Answer]) -> Recording:
    """Answers, one behind the other."""
    return Recording(
        torch.cat([each.hidden for each in answers]),
        torch.tensor([token_id for each in answers for token_id in each.token_ids]),
        tuple(len(each.token_ids) for each in answers),
    )


def questions(prompts: Sequence[Sequence[int]], seed: int) -> list[Question]:
    """Prompts, each at one of several temperatures in turn, with noise of its own."""
    return [Question(prompt, _TEMPERATURES[index % len(_TEMPERATURES)], derive_key(seed, "text", index)) for index, prompt in enumerate(prompts)]


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
