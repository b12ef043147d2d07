"""From spans of tokens to the index tensors of one forward pass. Pure; it does not know the model, its layers or its heads.

All rows of all spans run through the model as one sequence of length T. Attention alone looks at spans: those of similar
shape attend together as one padded group, and what a group reads is worked out once per forward pass and window.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.errors import EngineFailure

# Spans up to this long are padded to one another; longer ones attend alone, this many queries at a time, so that the
# scores of a long prompt never exist all at once.
_SHORT_SPAN = 16
_TILE = 64
# Contexts are padded to the longest of their group, which is at most twice the shortest, or this many tokens.
_SMALL_CONTEXT = 256
# Positions that a group may gather at once, padding included: many rows of long contexts attend in several groups.
_MAX_GATHERED = 65_536


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence that run and attend together. A row of batch expansion is a span of one token.

    Args:
        token_ids: at least one.
        start: position of the first of them.
        block_table: blocks of the sequence, with slots for all these tokens.
        num_logits: logits are wanted for the last `num_logits` tokens, 0 to all.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int

    @property
    def end(self) -> int:
        """One past the position of the last token: the context length of its query."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Context:
    """What the queries of a group may read.

    Args:
        slots: [num_spans * width] int64. Padding repeats the span's own last slot, so that nothing foreign is ever read.
        run: the slots as a slice, if they are consecutive: what lies side by side need not be gathered.
        width: positions per span, padding included.
        mask: [num_spans, 1, num_queries * queries_per_key, width] of the model's dtype, 0 where allowed and -inf elsewhere;
            None where everything is allowed.
    """

    slots: Tensor
    run: slice | None
    width: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a span whose queries attend at once."""

    first_row: int
    start: int
    end: int
    table: int


@dataclass(slots=True, eq=False)
class SpanGroup:
    """Spans that attend together, padded to the longest.

    Args:
        rows: where the queries are among the T rows, span by span: a slice, or [num_spans * num_queries] int64. Padding
            repeats a span's last query: it computes the same once more, so writing the result back changes nothing.
        num_spans: how many.
        num_queries: queries per span, padding included.
        starts: position of the first query of each span.
        ends: one past the position of the last.
        first_block: of a single span whose blocks follow one another.
    """

    rows: slice | Tensor
    num_spans: int
    num_queries: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    first_block: int | None
    _block_tables: Tensor
    _block_size: int
    _contexts: dict[tuple[int | None, int], Context] = field(default_factory=dict)

    def context(self, window: int | None, queries_per_key: int, dtype: torch.dtype) -> Context:
        """What the queries read, worked out when the first layer of its kind asks.

        Args:
            window: a query at position i reads positions above i - window; None: all up to its own.
            queries_per_key: query heads that share a key head; the mask has a row for each.
            dtype: of the mask.
        """
        key = (window, queries_per_key)
        if key not in self._contexts:
            self._contexts[key] = self._build_context(window, queries_per_key, dtype)
        return self._contexts[key]

    def _build_context(self, window: int | None, queries_per_key: int, dtype: torch.dtype) -> Context:
        device = self._block_tables.device
        firsts = [0 if window is None else max(0, start - window + 1) for start in self.starts]
        widths = [end - first for first, end in zip(firsts, self.ends, strict=True)]
        width = max(widths)
        bounds = torch.tensor([firsts, self.starts, self.ends]).to(device, non_blocking=True)
        first, start, end = bounds[:, :, None].unbind(0)

        positions = first + torch.arange(width, device=device)
        readable = torch.minimum(positions, end - 1)
        blocks = self._block_tables.gather(1, readable // self._block_size)
        slots = (blocks * self._block_size + readable % self._block_size).flatten()
        run = None
        if self.first_block is not None:
            first_slot = self.first_block * self._block_size + firsts[0]
            run = slice(first_slot, first_slot + width)
        if self.num_queries == 1 and min(widths) == width:
            return Context(slots, run, width, None)

        queries = torch.minimum(start + torch.arange(self.num_queries, device=device), end - 1)
        allowed = positions[:, None, :] <= queries[:, :, None]
        if window is not None:
            allowed &= positions[:, None, :] > queries[:, :, None] - window
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))
        if self.num_queries > 1:
            mask = mask.repeat_interleave(queries_per_key, dim=1)
        return Context(slots, run, width, mask[:, None])


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass over T rows.

    Args:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        slots: [T] int64, where each row's keys and values go.
        logit_rows: [sum of num_logits] int64, in span order.
        groups: together they hold every row.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    logit_rows: Tensor
    groups: tuple[SpanGroup, ...]


def build(spans: Sequence[Span], block_size: int, device: torch.device) -> ForwardBatch:
    """Builds the tensors of one forward pass.

    Args:
        spans: at least one. Spans of one sequence may be many (batch expansion); no position may occur twice.
        block_size: tokens per block.
        device: where the tensors go.

    Raises:
        EngineFailure: a span is empty, wants more logits than it has tokens or has no slot for one of them.
    """
    if not spans:
        raise EngineFailure("a forward pass needs at least one span")
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    pieces: dict[tuple[int, ...], list[_Piece]] = defaultdict(list)
    tables: list[Sequence[int]] = []
    table_index: dict[int, int] = {}
    for span in spans:
        _check(span, block_size)
        first_row, num_tokens = len(token_ids), len(span.token_ids)
        token_ids.extend(span.token_ids)
        positions.extend(range(span.start, span.end))
        slots.extend(span.block_table[position // block_size] * block_size + position % block_size for position in range(span.start, span.end))
        logit_rows.extend(range(first_row + num_tokens - span.num_logits, first_row + num_tokens))
        # The rows of an expanded sequence share one table object: it is stored once.
        table = table_index.setdefault(id(span.block_table), len(tables))
        if table == len(tables):
            tables.append(span.block_table)
        step = num_tokens if num_tokens <= _SHORT_SPAN else _TILE
        for offset in range(0, num_tokens, step):
            start = span.start + offset
            piece = _Piece(first_row + offset, start, min(start + step, span.end), table)
            alone = (first_row, offset) if num_tokens > _SHORT_SPAN else ()
            pieces[(min(num_tokens, 2), _context_class(piece.end), *alone)].append(piece)
    rows = torch.tensor([token_ids, positions, slots]).to(device, non_blocking=True)
    groups = tuple(_group(part, tables, block_size, device) for members in pieces.values() for part in _split(members))
    return ForwardBatch(rows[0:1], rows[1:2], rows[2], torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True), groups)


def _check(span: Span, block_size: int) -> None:
    num_tokens = len(span.token_ids)
    if num_tokens == 0 or span.start < 0 or not 0 <= span.num_logits <= num_tokens:
        raise EngineFailure(f"a span of {num_tokens} tokens from position {span.start} with {span.num_logits} logits")
    if span.end > len(span.block_table) * block_size:
        raise EngineFailure(f"no slots for positions {span.start} to {span.end - 1} in {len(span.block_table)} blocks of {block_size}")


def _context_class(num_tokens: int) -> int:
    return max(_SMALL_CONTEXT, 1 << (num_tokens - 1).bit_length())


def _split(pieces: Sequence[_Piece]) -> list[Sequence[_Piece]]:
    size = max(1, _MAX_GATHERED // _context_class(pieces[0].end))
    return [pieces[first : first + size] for first in range(0, len(pieces), size)]


def _group(pieces: Sequence[_Piece], tables: Sequence[Sequence[int]], block_size: int, device: torch.device) -> SpanGroup:
    lengths = [piece.end - piece.start for piece in pieces]
    num_queries = max(lengths)
    rows = [piece.first_row + min(offset, length - 1) for piece, length in zip(pieces, lengths, strict=True) for offset in range(num_queries)]
    is_run = rows == list(range(rows[0], rows[0] + len(rows)))
    num_blocks = [-(-piece.end // block_size) for piece in pieces]
    widest = max(num_blocks)
    blocks = tables[pieces[0].table][:widest]
    is_one_run = len(pieces) == 1 and all(block == blocks[0] + index for index, block in enumerate(blocks))
    padded = [[*tables[piece.table][:count], *[0] * (widest - count)] for piece, count in zip(pieces, num_blocks, strict=True)]
    return SpanGroup(
        rows=slice(rows[0], rows[0] + len(rows)) if is_run else torch.tensor(rows).to(device, non_blocking=True),
        num_spans=len(pieces),
        num_queries=num_queries,
        starts=tuple(piece.start for piece in pieces),
        ends=tuple(piece.end for piece in pieces),
        first_block=blocks[0] if is_one_run else None,
        _block_tables=torch.tensor(padded).to(device, non_blocking=True),
        _block_size=block_size,
    )
