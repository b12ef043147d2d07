"""What came of a training, for people: a picture and a model card. It trains nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draft_service.mlp_speculator import SpeculatorConfig
from draft_service.training.trainer import Point

_CARD = """---
library_name: outrider
base_model: {target}
---

# MLP speculator for {target}

Foresees up to {n_predict} tokens from what the head of `{target}` reads (Wertheimer et al. 2024). It has no embedding and no head
of its own: those of the target are used, with a projection before and behind the state (`project_vocabulary`), and it foresees no
more than {num_foreseen:,} ids, those that the text had most often (`draft_vocab_size`); published speculators have neither.

```
outrider draft --speculator DIRECTORY
```

Trained on {num_tokens:,} tokens that the target wrote itself, at temperatures 0, 0.7 and 1, against its own distributions. On answers to
prompts that were not trained on ({num_held_out} of {num_prompts}, of the same kind), given that all tokens before are the target's:

| position | best token is the target's | sum min(p, q) at temperature 1 |
|---|---|---|
{rows}

Settings: {settings}. The picture: `training.png`.
"""


def write_card(points: Sequence[Point], config: SpeculatorConfig, plan: Mapping[str, Any], num_tokens: int, num_held_out: int, file: Path) -> None:
    """Writes the model card.

    Args:
        points: of the training; the last counts.
        config: sizes.
        plan: what was asked for.
        num_tokens: trained on.
        num_held_out: prompts that were not trained on.
        file: where.
    """
    last = points[-1].score
    pairs = enumerate(zip(last.greedy.tolist(), last.overlap.tolist(), strict=True))
    rows = "\n".join(f"| {index} | {greedy:.3f} | {overlap:.3f} |" for index, (greedy, overlap) in pairs)
    settings = ", ".join(f"{name} {setting}" for name, setting in plan.items() if name not in ("prompts", "target"))
    values = {
        "target": plan["target"],
        "num_prompts": len(plan["prompts"]),
        "n_predict": config.n_predict,
        "num_foreseen": config.draft_vocab_size or config.vocab_size,
        "num_tokens": num_tokens,
        "num_held_out": num_held_out,
    }
    file.write_text(_CARD.format(**values, rows=rows, settings=settings), encoding="utf-8")


def write_plot(points: Sequence[Point], file: Path) -> None:
    """Loss and acceptance over the steps, a line for each position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    losses, accepted = FigureCanvasAgg(figure).figure.subplots(1, 2)
    steps = [point.step for point in points]
    losses.plot(steps, [point.train_loss for point in points], color="0.6", label="training, mean")
    for index in range(len(points[-1].score.loss)):
        losses.plot(steps, [float(point.score.loss[index]) for point in points], label=f"position {index}")
        accepted.plot(steps, [float(point.score.greedy[index]) for point in points], color=f"C{index}", label=f"position {index}, best token")
        accepted.plot(steps, [float(point.score.overlap[index]) for point in points], color=f"C{index}", linestyle="--")
    losses.set(xlabel="step", ylabel="cross-entropy against the target, nats", title="Loss on text not trained on")
    accepted.set(xlabel="step", ylabel="share", ylim=(0, 1), title="Best token right; dashed: sum min(p, q) at T = 1")
    for axes in (losses, accepted):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file)
