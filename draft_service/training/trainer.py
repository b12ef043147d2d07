"""Fits a speculator to recorded text. It owns steps, checkpoints and the learning rate; it knows no files of text and no progress bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_service.mlp_speculator import MlpSpeculator, SpeculatorConfig
from draft_service.training.corpus import Recording
from draft_service.training.objective import Score, places, score
from shared.noise import derive_key

_WARM_UP = 0.05  # of all steps
_LEAST_RATE = 0.05  # of the highest, at the end
_CHECKPOINT = "checkpoint.pt"
BATCH_ROWS = 512


@dataclass(frozen=True, slots=True)
class Schedule:
    """How to train.

    Args:
        num_steps: optimiser steps.
        rate: highest learning rate.
        seed: of weights and of the order, uint64.
        batch_rows: places in a step.
        evaluate_every: steps between two looks at text that is not trained on; a checkpoint is written then.
    """

    num_steps: int
    rate: float
    seed: int
    batch_rows: int = BATCH_ROWS
    evaluate_every: int = 100


@dataclass(frozen=True, slots=True)
class Point:
    """One look at text that is not trained on."""

    step: int
    train_loss: float
    score: Score


class Trainer:
    """A speculator in training.

    Args:
        config: its sizes, with `project_vocabulary`: embedding and head are the target's, and stay as they are.
        embedding: of the target, [vocab_size, hidden_size].
        head: of the target, likewise.
        head_ids: [draft_vocab_size] int64, what it can foresee; None: everything.
        schedule: how.
        directory: for the checkpoint; one that is there is taken up.
    """

    def __init__(
        self, config: SpeculatorConfig, embedding: Tensor, head: Tensor, head_ids: Tensor | None, schedule: Schedule, directory: Path
    ) -> None:
        torch.manual_seed(schedule.seed)
        self.speculator = MlpSpeculator(config)
        self.speculator.head_ids = head_ids
        self._head = head
        for emb in self.speculator.emb:
            emb.weight = nn.Parameter(embedding.float(), requires_grad=False)
        self._own = {name: each for name, each in self.speculator.named_parameters() if not name.startswith(("emb.", "head."))}
        self._schedule = schedule
        self._optimizer = torch.optim.AdamW(self._own.values(), lr=schedule.rate, weight_decay=0.01)
        self._rate = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _share_of_rate(step, schedule.num_steps))
        self._file = directory / _CHECKPOINT
        self.step = 0
        self.points: list[Point] = []
        if self._file.exists():
            self._take_up(torch.load(self._file, weights_only=True))

    def own_tensors(self) -> dict[str, Tensor]:
        """What is trained: the speculator's alone."""
        return {name: each.detach() for name, each in self._own.items()}

    def run(self, training: Sequence[Recording], held_out: Recording, on_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Trains to the end of the schedule, from where it stands.

        Args:
            training: text to learn from.
            held_out: text to look at.
            on_step: told the number of steps done and the loss of the last.
        """
        token_ids, hidden = torch.cat([part.token_ids for part in training]), torch.cat([part.hidden for part in training])
        rows = places(torch.tensor([length for part in training for length in part.lengths]), self.speculator.config.n_predict)
        recent: list[float] = []
        while self.step < self._schedule.num_steps:
            chosen = self._rows_of(self.step, rows)
            losses = score(self.speculator, hidden, token_ids, chosen, self._head).loss
            self._optimizer.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]  # untyped in PyTorch
            nn.utils.clip_grad_norm_(self._own.values(), 1.0)
            self._optimizer.step()
            self._rate.step()
            self.step += 1
            recent.append(float(losses.detach().mean()))
            on_step(self.step, recent[-1])
            if self.step % self._schedule.evaluate_every == 0 or self.step == self._schedule.num_steps:
                self.points.append(Point(self.step, sum(recent) / len(recent), self.evaluate(held_out)))
                recent.clear()
                self._save()

    @torch.inference_mode()
    def evaluate(self, held_out: Recording) -> Score:
        """On all of a recording, weighed by the places."""
        rows = places(torch.tensor(held_out.lengths), self.speculator.config.n_predict)
        parts = torch.split(rows, self._schedule.batch_rows)
        scores = [score(self.speculator, held_out.hidden, held_out.token_ids, part, self._head) for part in parts]
        weights = torch.tensor([len(part) / len(rows) for part in parts])[:, None]
        return Score(*((torch.stack([getattr(each, name) for each in scores]) * weights).sum(0) for name in ("loss", "greedy", "overlap")))

    def _rows_of(self, step: int, rows: Tensor) -> Tensor:
        """Runs of neighbours: what the target says at a place is worked out once for all heads that foresee it. The same in every run."""
        run = 64
        generator = torch.Generator().manual_seed(derive_key(self._schedule.seed, "step", step))
        starts = torch.randint(0, max(1, len(rows) - run), (max(1, self._schedule.batch_rows // run),), generator=generator)
        chosen: Tensor = torch.unique((starts[:, None] + torch.arange(min(run, len(rows)))).flatten())
        return rows[chosen]

    def _save(self) -> None:
        partial = self._file.with_suffix(".partial")
        points = [
            {"step": each.step, "train_loss": each.train_loss, **{name: value.tolist() for name, value in asdict(each.score).items()}}
            for each in self.points
        ]
        state = {
            "own": self.own_tensors(),
            "optimizer": self._optimizer.state_dict(),
            "rate": self._rate.state_dict(),
            "step": self.step,
            "points": points,
        }
        torch.save(state, partial)
        partial.replace(self._file)

    def _take_up(self, state: dict[str, Any]) -> None:
        self.speculator.load_state_dict(state["own"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self._rate.load_state_dict(state["rate"])
        self.step = state["step"]
        self.points = [
            Point(each["step"], each["train_loss"], Score(*(torch.tensor(each[name]) for name in ("loss", "greedy", "overlap"))))
            for each in state["points"]
        ]


def _share_of_rate(step: int, num_steps: int) -> float:
    """Of the highest rate: up in a line, down along half a cosine."""
    warm = max(1, round(_WARM_UP * num_steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
