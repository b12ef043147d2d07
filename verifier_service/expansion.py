"""Batch expansion and contraction: one step's sequences become spans, what comes out becomes [B, K_max + 1]. It does not know the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared.engine.forward_batch import Span

Scorer = Literal["expanded", "multi_query"]

ABSENT_ID = -1
ABSENT_PROBABILITY = 0.0
ABSENT_LOGPROB = float("-inf")
ABSENT_HIDDEN = 0.0


@dataclass(frozen=True, slots=True)
class Scored:
    """What one sequence runs in a step: a plain decode, a verification, or a chunk of its prefill.

    Args:
        committed: the committed tokens; those from `kv_len` on have no KV yet.
        kv_len: tokens with KV, below len(committed).
        num_tokens: committed tokens to run, at least 1; fewer than are left is a prefill chunk without logits.
        block_table: blocks with slots for everything that runs, guesses included.
        guesses: draft tokens to score after the last committed one; empty unless all that is left runs.
    """

    committed: Sequence[int]
    kv_len: int
    block_table: Sequence[int]
    guesses: Sequence[int] = ()
    num_tokens: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of logits: one per guess and one for the next token; none before the prompt's end."""
        return 1 + len(self.guesses) if self.kv_len + self.num_tokens == len(self.committed) else 0


@dataclass(frozen=True, slots=True)
class Expansion:
    """Spans of a step, and the one map from flat rows to places.

    Args:
        spans: for the model runner, in the order of the sequences.
        places: for each row of logits, in order: (index of the sequence, row within the sequence).
        num_sequences: B.
        width: K_max + 1.
    """

    spans: tuple[Span, ...]
    places: tuple[tuple[int, int], ...]
    num_sequences: int
    width: int


def expand(sequences: Sequence[Scored], vocab_size: int, scorer: Scorer = "expanded") -> Expansion:
    """Turns sequences with guesses into spans.

    Row i of a sequence with L committed tokens holds the last committed token (i = 0) or guess i at position L - 1 + i; its logits say what
    follows guess i. A guess that is no token of the target is fed as token 0: it is rejected whatever its row says, and nothing that a
    drafter sent reaches a tensor index unchecked.

    Args:
        sequences: the step's sequences, in any mix.
        vocab_size: ids that the model knows.
        scorer: `expanded`: a span per scored token; `multi_query`: one span per sequence.
    """
    to_spans = _SCORERS[scorer]
    spans = tuple(span for scored in sequences for span in to_spans(scored, vocab_size))
    places = tuple((index, row) for index, scored in enumerate(sequences) for row in range(scored.num_rows))
    width = 1 + max((len(scored.guesses) for scored in sequences), default=0)
    return Expansion(spans, places, len(sequences), width)


def contract(rows: Tensor, expansion: Expansion, fill: float) -> Tensor:
    """Puts flat rows back to their sequences.

    Args:
        rows: [number of places, ...], in the order of the spans' logits: ids, probabilities, logprobs or hidden states.
        expansion: the one they come from.
        fill: what stands where a sequence has no row: one of the ABSENT constants.

    Returns:
        [B, K_max + 1, ...]
    """
    assert len(rows) == len(expansion.places), f"every row has one place: {len(rows)} rows, {len(expansion.places)} places"
    cells = torch.tensor([index * expansion.width + row for index, row in expansion.places], dtype=torch.int64, device=rows.device)
    flat = rows.new_full((expansion.num_sequences * expansion.width, *rows.shape[1:]), fill)
    flat[cells] = rows
    return flat.view(expansion.num_sequences, expansion.width, *rows.shape[1:])


def _expanded(scored: Scored, vocab_size: int) -> list[Span]:
    """One token per span: any attention that can decode can score."""
    committed = _committed_span(scored)
    first = len(scored.committed)
    guessed = [Span((token_id,), first + i, scored.block_table, 1) for i, token_id in enumerate(_fed(scored.guesses, vocab_size))]
    return [committed, *guessed]


def _multi_query(scored: Scored, vocab_size: int) -> list[Span]:
    """One span: the KV of the prefix is read once for all rows."""
    committed = _committed_span(scored)
    return [Span((*committed.token_ids, *_fed(scored.guesses, vocab_size)), committed.start, committed.block_table, scored.num_rows)]


def _committed_span(scored: Scored) -> Span:
    end = scored.kv_len + scored.num_tokens
    is_last = end == len(scored.committed)
    assert 0 <= scored.kv_len < end <= len(scored.committed), "a sequence runs committed tokens that have no KV"
    assert is_last or not scored.guesses, "guesses follow the last committed token"
    return Span(tuple(scored.committed[scored.kv_len : end]), scored.kv_len, scored.block_table, int(is_last))


def _fed(guesses: Sequence[int], vocab_size: int) -> list[int]:
    return [token_id if 0 <= token_id < vocab_size else 0 for token_id in guesses]


_SCORERS: dict[Scorer, Callable[[Scored, int], list[Span]]] = {"expanded": _expanded, "multi_query": _multi_query}
