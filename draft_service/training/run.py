"""`outrider train-speculator`, from prompts to a directory that the draft service loads. What was done before an interruption is not done again."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor

from draft_service.mlp_speculator import SpeculatorConfig
from draft_service.target_vocabulary import vocabulary_of
from draft_service.training.corpus import Recording, batches, most_frequent, questions, record
from draft_service.training.report import write_card, write_plot
from draft_service.training.trainer import BATCH_ROWS, Schedule, Trainer
from draft_service.training.writing import answer
from shared.default_model import resolve
from shared.engine.pool import Pool, PoolConfig, load_pool
from shared.errors import OutriderError
from shared.noise import derive_key
from shared.tokenizer import Tokenizer, load_tokenizer

_BLOCK_SIZE = 16
_HELD_OUT = 0.05  # of the prompts, at least one


class CannotTrain(OutriderError):
    """What was asked for cannot be trained; the text says why."""

    reason = "CANNOT_TRAIN"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train, and on what.

    Args:
        target: hub id, directory or alias.
        prompts: what the target is to continue.
        is_chat: each is a user's message.
        num_tokens: to let the target write.
        max_tokens: most for each text.
        batch: texts at once.
        n_predict: tokens that the speculator foresees.
        inner_dim: width of its state.
        draft_vocab: ids that it can foresee, the most frequent ones of the text; 0: all.
        passes: over the text.
        rate: highest learning rate.
        threads: CPU threads; 0 uses every core.
        seed: of everything that is drawn.
    """

    target: str
    prompts: tuple[str, ...]
    is_chat: bool
    num_tokens: int
    max_tokens: int
    batch: int
    n_predict: int
    inner_dim: int
    draft_vocab: int
    passes: float
    rate: float
    threads: int
    seed: int


def train(plan: Plan, out: Path, console: Console) -> None:
    """Writes text, trains on it and puts the speculator into `out`. Called again with the same plan, it goes on where it was interrupted.

    Args:
        plan: what.
        out: directory; made if it is not there.
        console: for progress.

    Raises:
        CannotTrain: `out` holds another plan's work, or there are less than two prompts.
        UnsupportedModel: the target cannot be served.
    """
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, plan)
    directory = resolve(plan.target)
    tokenizer = load_tokenizer(directory)
    prompts = _tokenized(plan, tokenizer)
    num_held_out = max(1, round(_HELD_OUT * len(prompts)))
    load = cache(lambda: _load(plan, directory, max(map(len, prompts))))
    write = partial(_recordings, plan, load, tokenizer.vocab_size, out / "corpus", console)
    held_out = _joined(write("held-out", _chunks(prompts[:num_held_out], plan.batch)))
    training = write("training", batches(prompts[num_held_out:], plan.batch, plan.seed), plan.num_tokens)
    embedding, head = vocabulary_of(directory)
    head_ids = most_frequent(training, plan.draft_vocab, len(head))
    num_foreseen = 0 if head_ids is None else len(head_ids)
    vocab_size, emb_dim = embedding.shape
    config = SpeculatorConfig(
        plan.n_predict,
        plan.inner_dim,
        emb_dim,
        vocab_size,
        tie_weights=True,
        scale_input=True,
        project_vocabulary=True,
        draft_vocab_size=num_foreseen,
        target=plan.target,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    num_tokens = sum(len(part.token_ids) for part in training)
    num_steps = max(1, round(plan.passes * num_tokens / BATCH_ROWS))
    trainer = Trainer(config, embedding, head, head_ids, Schedule(num_steps, plan.rate, plan.seed), out)
    with _progress(console, "training", num_steps) as (progress, task):
        progress.update(task, completed=trainer.step)

        def tell(step: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"training, loss {loss:.3f}")

        trainer.run(training, held_out, tell)
    _export(trainer, config, out)
    write_plot(trainer.points, out / "training.png")
    write_card(trainer.points, config, asdict(plan), num_tokens, num_held_out, out / "README.md")
    last = trainer.points[-1].score
    console.print(f"{out}: greedy {_row(last.greedy)}, overlap at T = 1 {_row(last.overlap)}, by position, on text that was not trained on")


def _claim(out: Path, plan: Plan) -> None:
    """Two plans' work would mix without a word."""
    file, said = out / "plan.json", json.loads(json.dumps(asdict(plan)))
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != said:
        raise CannotTrain(f"{out} holds the work of another plan: take another directory, or delete it")
    file.write_text(json.dumps(said, indent=1), encoding="utf-8")


def _tokenized(plan: Plan, tokenizer: Tokenizer) -> list[list[int]]:
    """All prompts, in an order of their own: those that are held out are as good as any others."""
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) if plan.is_chat else tokenizer.encode(text) for text in plan.prompts]
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if prompt]
    if len(prompts) < 2:
        raise CannotTrain(f"{len(prompts)} prompts are too few: some are not trained on, to see what was learnt")
    return random.Random(plan.seed).sample(prompts, len(prompts))


def _recordings(
    plan: Plan,
    load: Callable[[], Pool],
    vocab_size: int,
    corpus: Path,
    console: Console,
    name: str,
    work: Iterable[Sequence[Sequence[int]]],
    num_tokens: int | None = None,
) -> list[Recording]:
    """What the target says to batches of prompts, to the end or until it is enough; recordings that are not there yet are made."""
    corpus.mkdir(exist_ok=True)
    recordings: list[Recording] = []
    with _progress(console, f"writing text, {name}", num_tokens) as (progress, task):
        for number, batch in enumerate(work):
            done = sum(len(each.token_ids) for each in recordings)
            progress.update(task, completed=done)
            if num_tokens is not None and done >= num_tokens:
                break
            file = corpus / f"{name}-{number:05}.safetensors"
            if not file.exists():
                pool = load()
                told = partial(progress.advance, task)
                seed = derive_key(plan.seed, name, number)
                eos_ids = frozenset(pool.model.eos_token_ids)
                record(answer(pool.runner, pool.allocator, questions(batch, seed), plan.max_tokens, vocab_size, eos_ids, told)).save(file)
            recordings.append(Recording.load(file))
    return recordings


def _chunks(prompts: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _load(plan: Plan, directory: str, longest_prompt: int) -> Pool:
    num_blocks = plan.batch * -(-(longest_prompt + plan.max_tokens) // _BLOCK_SIZE)
    return load_pool(PoolConfig(directory, "auto", "auto", _BLOCK_SIZE, num_blocks, 0.5, plan.batch, 0, plan.threads), lambda _, __: None)


def _joined(recordings: Sequence[Recording]) -> Recording:
    return Recording(
        torch.cat([each.hidden for each in recordings]),
        torch.cat([each.token_ids for each in recordings]),
        tuple(length for each in recordings for length in each.lengths),
    )


def _export(trainer: Trainer, config: SpeculatorConfig, out: Path) -> None:
    """In the published form, without what is the target's."""
    tensors = {f"speculator.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in trainer.own_tensors().items()}
    if trainer.speculator.head_ids is not None:
        tensors["speculator.head_ids"] = trainer.speculator.head_ids
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", **asdict(config)}, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _progress(console: Console, what: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield progress, progress.add_task(what, total=total)


def _row(values: Tensor) -> str:
    return " ".join(f"{value:.2f}" for value in values.tolist())
