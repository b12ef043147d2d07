"""What the head of a model reads: the final hidden states of the rows that have logits. It does not know what becomes of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def head_input(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what the head reads while it is open: for each pass [sum of num_logits, hidden_size], rows as in the logits."""
    seen: list[Tensor] = []

    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments[0].flatten(0, -2))

    hook = _head(model).register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def head_width(model: PreTrainedModel) -> int:
    """Numbers that the head reads for a row; 0 where that cannot be told: it is no linear layer, or there is none."""
    return int(getattr(_head(model), "in_features", 0))


def _head(model: PreTrainedModel) -> nn.Module:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
    return head
