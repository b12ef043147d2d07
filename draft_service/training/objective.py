"""How far a speculator is from its target, over recorded text: the loss to train on, and the share of guesses that would be accepted. Pure."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draft_service.mlp_speculator import MlpSpeculator


@dataclass(frozen=True, slots=True)
class Score:
    """How a speculator does, per head.

    Args:
        loss: [n_predict] cross-entropy against the target's distribution at temperature 1, in nats.
        greedy: [n_predict] share of places where the head's best token is the target's, all tokens before it being right.
        overlap: [n_predict] mean of sum min(p, q): the best acceptance that any rule could reach at temperature 1 (Leviathan et al. 2023).
    """

    loss: Tensor
    greedy: Tensor
    overlap: Tensor


def places(lengths: Tensor, n_predict: int) -> Tensor:
    """Rows from which all heads have something to foresee: `n_predict` more tokens of the same text follow.

    Args:
        lengths: [number of texts] of texts, one behind the other.
        n_predict: heads.

    Returns:
        [M] int64, ascending.
    """
    ends = lengths.cumsum(0)
    text = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows = torch.arange(int(lengths.sum()))
    return rows[rows + n_predict < ends[text]]


def score(speculator: MlpSpeculator, hidden: Tensor, token_ids: Tensor, rows: Tensor, head: Tensor) -> Score:
    """Compares with what the target said.

    Head i, from row j, foresees token j + 1 + i, which the target chose from row j + 1 + i.

    Args:
        speculator: its layers.
        hidden: [N, hidden_size] of a stretch of recorded text.
        token_ids: [N].
        rows: [M] rows of that stretch, all with `n_predict` more behind them; see `places`.
        head: [vocab_size, hidden_size] of the target. Of the target's distributions all counts, of the speculator's what it has rows for.
    """
    ids = speculator.head_ids
    own_head = head if ids is None else head[ids]
    n_predict = speculator.config.n_predict
    wanted = torch.unique(torch.cat([rows + 1 + index for index in range(n_predict)]))
    with torch.no_grad():
        said = nn.functional.linear(hidden[wanted].to(head.dtype), head).float().log_softmax(-1)
    place_of = torch.full((int(wanted.max()) + 1,), -1)
    place_of[wanted] = torch.arange(len(wanted))
    state = speculator.begin(hidden[rows].float())
    losses, right, overlaps = [], [], []
    for index in range(n_predict):
        state = speculator.advance(index, state, token_ids[rows + index])
        foreseen = nn.functional.linear(speculator.head_input(index, state).to(head.dtype), own_head).float().log_softmax(-1)
        everything = said[place_of[rows + 1 + index]]
        expected = everything if ids is None else everything[:, ids]
        losses.append(-(expected.exp() * foreseen).sum(-1).mean())
        with torch.no_grad():
            best = foreseen.argmax(-1) if ids is None else ids[foreseen.argmax(-1)]
            right.append((best == everything.argmax(-1)).float().mean())
            overlaps.append(torch.minimum(foreseen.exp(), expected.exp()).sum(-1).mean())
    return Score(torch.stack(losses), torch.stack(right), torch.stack(overlaps))
