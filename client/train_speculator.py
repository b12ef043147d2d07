"""`outrider train-speculator`: flags to a plan. What is done with it is the draft service's affair."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shared.default_model import DEFAULT_TARGET

TRAIN_HELP = "Train an MLP speculator for a target, on text that the target writes. Interrupted, it goes on where it was."


def train_speculator_command(
    prompts: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="What the target is to continue: a text file, a prompt on each line.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Directory for the speculator, its model card, the picture, and the work in between.")],
    target: Annotated[str, typer.Option(help="Target model: hub id, directory or alias.")] = DEFAULT_TARGET,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message: apply the model's chat template.")] = False,
    num_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens that the target writes to learn from.")] = 400_000,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of one text.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Texts written at once.")] = 48,
    n_predict: Annotated[int, typer.Option(min=1, max=16, help="Tokens that it is to foresee.")] = 4,
    inner_dim: Annotated[int, typer.Option(min=8, help="Width of its state.")] = 1024,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Ids that it can foresee, the most frequent ones of the text; 0: all.")] = 8192,
    passes: Annotated[float, typer.Option(min=0.01, help="How often the text is gone through.")] = 2.0,
    rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Highest learning rate.")] = 2e-3,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 uses every core.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
) -> None:
    """Train a speculator."""
    from client.bench.plots import require_matplotlib
    from draft_service.training.run import Plan, train

    require_matplotlib()
    lines = tuple(line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip())
    plan = Plan(target, lines, chat, num_tokens, max_tokens, batch, n_predict, inner_dim, draft_vocab, passes, rate, threads, seed)
    train(plan, out, Console(stderr=True, highlight=False))
