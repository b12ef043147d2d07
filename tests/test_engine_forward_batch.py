import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.forward_batch import Span, build
from shared.errors import EngineFailure

BLOCK_SIZE = 4
CPU = torch.device("cpu")
LENGTHS = st.lists(st.tuples(st.one_of(st.just(1), st.integers(1, 20), st.integers(60, 200)), st.integers(0, 700)), min_size=1, max_size=12)


def spans_of(shapes, num_logits=1):
    """One sequence per (length, start), each with blocks of its own."""
    spans, next_block = [], 0
    for length, start in shapes:
        num_blocks = -(-(start + length) // BLOCK_SIZE)
        spans.append(Span([7] * length, start, list(range(next_block, next_block + num_blocks)), num_logits))
        next_block += num_blocks
    return spans


def rows_of(group, num_rows):
    return torch.arange(num_rows)[group.rows].view(group.num_spans, group.num_queries)


@given(LENGTHS)
def test_every_row_attends_in_one_group_at_its_own_position(shapes):
    batch = build(spans_of(shapes), BLOCK_SIZE, CPU)
    num_rows = batch.input_ids.shape[1]
    seen = []
    for group in batch.groups:
        rows = rows_of(group, num_rows)
        for index, (start, end) in enumerate(zip(group.starts, group.ends, strict=True)):
            own = rows[index, : end - start]
            assert batch.position_ids[0, own].tolist() == list(range(start, end))
            # Padding repeats the last query.
            assert (rows[index, end - start :] == own[-1]).all()
            seen += own.tolist()
    assert sorted(seen) == list(range(num_rows))


@given(LENGTHS, st.sampled_from([None, 1, 8, 300]))
def test_queries_read_exactly_their_own_visible_slots(shapes, window):
    spans = spans_of(shapes)
    batch = build(spans, BLOCK_SIZE, CPU)
    num_rows = batch.input_ids.shape[1]
    for group in batch.groups:
        context = group.context(window, 1, torch.float64)
        slots = context.slots.view(group.num_spans, context.width)
        rows = rows_of(group, num_rows)
        for index in range(group.num_spans):
            for query in range(group.num_queries):
                position, own_slot = int(batch.position_ids[0, rows[index, query]]), int(batch.slots[rows[index, query]])
                visible = slots[index] if context.mask is None else slots[index][context.mask[index, 0, query] == 0]
                first = 0 if window is None else max(0, position - window + 1)
                # Blocks were dealt in order, so slots of a sequence are consecutive.
                assert visible.tolist() == list(range(own_slot - position + first, own_slot + 1))


@given(LENGTHS)
def test_nothing_foreign_is_gathered_even_as_padding(shapes):
    spans = spans_of(shapes)
    batch = build(spans, BLOCK_SIZE, CPU)
    for group in batch.groups:
        context = group.context(None, 1, torch.float64)
        slots = context.slots.view(group.num_spans, context.width)
        for index, end in enumerate(group.ends):
            assert slots[index].max() - slots[index].min() == end - 1


@given(LENGTHS, st.sampled_from([None, 1, 8, 300]), st.randoms(use_true_random=False))
def test_a_run_of_slots_is_the_same_as_the_slots(shapes, window, order):
    spans = spans_of(shapes)
    shuffled = []
    for span in spans:
        table = list(span.block_table)
        if order.random() < 0.5:
            order.shuffle(table)
        shuffled.append(Span(span.token_ids, span.start, table, span.num_logits))
    for group in build(shuffled, BLOCK_SIZE, CPU).groups:
        context = group.context(window, 1, torch.float64)
        if context.run is not None:
            assert group.num_spans == 1
            assert context.slots.tolist() == list(range(context.run.start, context.run.stop))


def test_blocks_side_by_side_are_a_run_and_others_are_not():
    runs = [build([Span([1], 9, table, 1)], BLOCK_SIZE, CPU).groups[0].context(None, 1, torch.float64).run for table in ([3, 4, 5], [3, 5, 4])]
    assert runs == [slice(12, 22), None]


@given(LENGTHS)
def test_padding_and_score_blocks_are_bounded(shapes):
    for group in build(spans_of(shapes), BLOCK_SIZE, CPU).groups:
        assert group.num_queries <= 64
        assert group.num_spans == 1 or group.num_queries <= 16
        assert max(group.ends) <= max(256, 2 * min(group.ends))


def test_many_rows_of_long_contexts_are_gathered_a_part_at_a_time():
    table = list(range(5000))
    batch = build([Span([1], 19_999 - row, table, 1) for row in range(7)], BLOCK_SIZE, CPU)
    assert [group.num_spans for group in batch.groups] == [2, 2, 2, 1]


def test_rows_of_mixed_work_form_few_groups():
    shapes = [(1, 30), (1, 31), (5, 30), (1, 99), (3, 12), (5, 70)]
    batch = build(spans_of(shapes), BLOCK_SIZE, CPU)
    assert sorted((group.num_spans, group.num_queries) for group in batch.groups) == [(3, 1), (3, 5)]


def test_mask_is_built_once_per_kind_of_layer():
    (group,) = build(spans_of([(4, 30), (3, 7)]), BLOCK_SIZE, CPU).groups
    assert group.context(None, 2, torch.float32) is group.context(None, 2, torch.float32)
    assert group.context(None, 2, torch.float32) is not group.context(8, 2, torch.float32)


def test_equal_contexts_of_single_tokens_need_no_mask():
    (group,) = build(spans_of([(1, 30), (1, 30)]), BLOCK_SIZE, CPU).groups
    assert group.context(None, 2, torch.float32).mask is None
    assert group.context(8, 2, torch.float32).mask is None


def test_logits_are_wanted_for_the_last_rows_of_each_span():
    shapes = [(3, 0), (5, 0), (1, 0)]
    spans = [Span(span.token_ids, span.start, span.block_table, wanted) for span, wanted in zip(spans_of(shapes), (2, 0, 1), strict=True)]
    assert build(spans, BLOCK_SIZE, CPU).logit_rows.tolist() == [1, 2, 8]


@pytest.mark.parametrize(
    "span",
    [
        Span([], 0, [0], 0),
        Span([1], -1, [0], 1),
        Span([1], 0, [0], 2),
        Span([1], 0, [0], -1),
        Span([1, 2], 3, [0], 1),
        Span([1], 0, [], 1),
    ],
)
def test_impossible_span_is_refused(span):
    with pytest.raises(EngineFailure):
        build([Span([1], 0, [5], 1), span], BLOCK_SIZE, CPU)


def test_empty_batch_is_refused():
    with pytest.raises(EngineFailure, match="at least one span"):
        build([], BLOCK_SIZE, CPU)
