"""Paged = contiguous: logits through the paged cache equal the plain `transformers` forward (invariant 2 of exactness)."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from shared.engine.attention import IMPLEMENTATION, AttentionCall, write_then_attend
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span, build
from shared.engine.kv_cache import LayerShape, PagedKVCache
from shared.engine.model_loader import wrap
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence
from shared.errors import EngineFailure
from tests.support.kv_oracle import assert_kv_matches_fresh_prefill
from tests.support.tiny_models import ARCHITECTURES, SLIDING_WINDOW, random_model, tiny_llama

NUM_BLOCKS, BLOCK_SIZE, VOCAB = 80, 4, 64
ATOL = 1e-10


def contiguous_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """The textbook: the eager attention of `transformers`, which is float32 in its softmax, in the model's own dtype."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (scores + attention_mask).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), weights


AttentionInterface.register("test_contiguous", contiguous_attention)
AttentionMaskInterface.register("test_contiguous", eager_mask)


class Pair:
    """The same weights twice: plain `transformers`, and ours with a cache full of NaN and blocks in random order."""

    def __init__(self, name, dtype=torch.float64):
        self.plain = random_model(name, VOCAB, dtype=dtype)
        self.plain.set_attn_implementation("test_contiguous")
        self.loaded = wrap(random_model(name, VOCAB, dtype=dtype), name)

    def expected(self, token_ids):
        with torch.inference_mode():
            return self.plain(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    def runner(self, seed=0):
        runner = ModelRunner(self.loaded, NUM_BLOCKS, BLOCK_SIZE)
        for tensor in [*runner.cache.keys, *runner.cache.values]:
            tensor.fill_(float("nan"))
        return runner, shuffled_allocator(seed)


def shuffled_allocator(seed, num_blocks=NUM_BLOCKS):
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
    blocks = allocator.allocate(num_blocks)
    random.Random(seed).shuffle(blocks)
    allocator.release(blocks)
    return allocator


def tokens(length, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


def sequence_of(length, allocator, seed=0):
    sequence = Sequence(tokens(length, seed))
    sequence.reserve(length, allocator)
    return sequence


def run_in_pieces(runner, sequence, lengths):
    """Feeds the sequence span by span, all logits wanted."""
    logits, start = [], 0
    for length in lengths:
        logits.append(runner.forward([Span(sequence.token_ids[start : start + length], start, sequence.block_table, length)]))
        start += length
    sequence.kv_len = start
    return torch.cat(logits)


def assert_equal(actual, expected, atol=ATOL):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=atol)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize("lengths", [[45], [20, 20, 5], [1] * 45, [7, 1, 1, 13, 16, 4, 3]], ids=["whole", "chunks", "single", "mixed"])
def test_prefill_in_pieces_equals_plain_forward(pair, lengths):
    runner, allocator = pair.runner()
    sequence = sequence_of(45, allocator)
    assert_equal(run_in_pieces(runner, sequence, lengths), pair.expected(sequence.token_ids))


def test_prompt_longer_than_a_tile_equals_plain_forward(pair):
    runner, allocator = pair.runner()
    sequence = sequence_of(200, allocator)
    assert_equal(run_in_pieces(runner, sequence, [150, 50]), pair.expected(sequence.token_ids))


@pytest.mark.parametrize("num_guesses", [1, 3, 12])
def test_expanded_rows_equal_one_span_and_plain_forward(pair, num_guesses):
    prefix = 30
    runs = {}
    for scorer in ("expanded", "multi_query"):
        runner, allocator = pair.runner(seed=num_guesses)
        sequence = sequence_of(prefix + 1 + num_guesses, allocator)
        runner.forward([Span(sequence.token_ids[:prefix], 0, sequence.block_table, 0)])
        scored = sequence.token_ids[prefix:]
        if scorer == "expanded":
            spans = [Span([token_id], prefix + row, sequence.block_table, 1) for row, token_id in enumerate(scored)]
        else:
            spans = [Span(scored, prefix, sequence.block_table, len(scored))]
        runs[scorer] = runner.forward(spans)
        assert runner.num_forwards == 2
        sequence.kv_len = len(sequence.token_ids)
        assert_kv_matches_fresh_prefill(runner, sequence)
    assert_equal(runs["expanded"], pair.expected(sequence.token_ids)[prefix:])
    assert_equal(runs["multi_query"], runs["expanded"])


# What a sequence brings to one mixed forward: kind, length of the prefix that has been run, size, seed.
WORK = st.tuples(
    st.sampled_from(["decode", "expanded", "multi_query", "chunk", "prompt"]), st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000)
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(WORK, min_size=1, max_size=6), order=st.randoms(use_true_random=False))
def test_any_mixed_batch_equals_plain_forwards(pair, plan, order):
    runner, allocator = pair.runner(seed=order.randrange(1000))
    work = []
    for kind, drawn_prefix, drawn_size, seed in plan:
        size = {"decode": 1, "chunk": drawn_size + 14, "prompt": drawn_size + 20}.get(kind, drawn_size)
        prefix = 0 if kind == "prompt" else drawn_prefix
        sequence = sequence_of(prefix + size, allocator, seed)
        if prefix:
            runner.forward([Span(sequence.token_ids[:prefix], 0, sequence.block_table, 0)])
        step = 1 if kind == "expanded" else size
        for start in range(prefix, prefix + size, step):
            num_logits = min(step, 3)
            span = Span(sequence.token_ids[start : start + step], start, sequence.block_table, num_logits)
            work.append((span, pair.expected(sequence.token_ids[: span.end])[-num_logits:]))
    # Rows of one sequence need not stand side by side, nor in order.
    order.shuffle(work)
    num_forwards = runner.num_forwards
    assert_equal(runner.forward([span for span, _ in work]), torch.cat([expected for _, expected in work]))
    assert runner.num_forwards == num_forwards + 1


def test_rewound_and_overwritten_positions_leave_no_trace(pair):
    runner, allocator = pair.runner()
    sequence = sequence_of(30, allocator)
    run_in_pieces(runner, sequence, [20])
    runner.forward([Span(tokens(8, seed=5), 20, sequence.block_table, 0)])
    sequence.rewind(20)
    logits = runner.forward([Span(sequence.token_ids[20:23], 20, sequence.block_table, 3)])
    sequence.kv_len = 23
    assert_equal(logits, pair.expected(sequence.token_ids[:23])[20:])
    assert_kv_matches_fresh_prefill(runner, sequence, allocator)


def test_rows_of_one_sequence_read_what_the_rows_before_them_have_just_written():
    """The order that batch expansion rests on, without a model: every write of a layer comes before every read."""
    shape = LayerShape(num_kv_heads=2, key_dim=8, value_dim=6)
    cache = PagedKVCache([shape], num_blocks=4, block_size=BLOCK_SIZE, dtype=torch.float64, device=torch.device("cpu"))
    for tensor in [*cache.keys, *cache.values]:
        tensor.fill_(float("nan"))
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(6, heads, dim, generator=generator, dtype=torch.float64) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    batch = build([Span([1], position, [3, 1], 1) for position in range(6)], BLOCK_SIZE, torch.device("cpu"))
    output = write_then_attend(cache, batch, AttentionCall(0, queries, keys, values, scaling=0.5, softcap=None, window=None))
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(2, 1)) * 0.5
    weights = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")).softmax(-1)
    assert_equal(output, torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(2, 1)))


def test_rows_of_one_sequence_that_attend_in_two_groups_read_each_other():
    """Rows on both sides of position 256 attend apart, and those beyond it first, in the group of a longer sequence."""
    scored = {}
    for step in (1, 7):
        runner, allocator = ModelRunner(tiny_llama(), 160, BLOCK_SIZE), shuffled_allocator(0, 160)
        for tensor in [*runner.cache.keys, *runner.cache.values]:
            tensor.fill_(float("nan"))
        longer, crossing = sequence_of(300, allocator), sequence_of(260, allocator, seed=1)
        runner.forward([Span(longer.token_ids[:299], 0, longer.block_table, 0), Span(crossing.token_ids[:253], 0, crossing.block_table, 0)])
        spans = [Span(crossing.token_ids[start : start + step], start, crossing.block_table, step) for start in range(253, 260, step)]
        spans.insert(0, Span(longer.token_ids[299:], 299, longer.block_table, 1))
        scored[step] = runner.forward(spans)
        assert len(build(spans, BLOCK_SIZE, torch.device("cpu")).groups) == 2
    assert_equal(scored[1], scored[7])


@pytest.mark.parametrize(
    ("name", "field"), [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma3", "sliding_window"), ("gemma2", "softcap")]
)
def test_window_and_softcap_matter_in_these_models(name, field):
    """Negative control: an attention that ignores one of them gives other logits, so the tests above could fail."""
    loaded = Pair(name).loaded
    runner = ModelRunner(loaded, NUM_BLOCKS, BLOCK_SIZE)
    span = Span(tokens(30), 0, list(range(8)), 30)
    expected = runner.forward([span])
    original = AttentionInterface()[IMPLEMENTATION]
    AttentionInterface.register(IMPLEMENTATION, lambda *args, **kwargs: original(*args, **kwargs | {field: None}))
    try:
        difference = (runner.forward([span]) - expected).abs().amax(1)
    finally:
        AttentionInterface.register(IMPLEMENTATION, original)
    assert difference.max() > 0.01
    if field == "sliding_window":
        assert difference[:SLIDING_WINDOW].max() < ATOL


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_narrow_dtypes_stay_close_and_give_logits_of_their_own(pair, dtype, atol):
    narrow = Pair(pair.loaded.name, dtype)
    runner, allocator = narrow.runner()
    sequence = sequence_of(40, allocator)
    logits = run_in_pieces(runner, sequence, [25, 1, 1, 5, 8])
    assert logits.dtype == dtype
    assert_equal(logits, narrow.expected(sequence.token_ids), atol)


def test_sdpa_of_transformers_agrees_with_the_textbook(pair):
    if pair.loaded.name == "gemma2":
        pytest.skip("transformers has no SDPA for soft-capped scores")
    token_ids = tokens(45)
    expected = pair.expected(token_ids)
    pair.plain.set_attn_implementation("sdpa")
    assert_equal(pair.expected(token_ids), expected)
    pair.plain.set_attn_implementation("test_contiguous")


def test_only_wanted_rows_go_through_the_output_layer():
    loaded = tiny_llama()
    runner = ModelRunner(loaded, 8, BLOCK_SIZE)
    rows = []
    hook = loaded.model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    logits = runner.forward([Span(tokens(9), 0, [0, 1, 2], 2), Span(tokens(6), 0, [3, 4], 0), Span(tokens(1), 0, [5], 1)])
    assert logits.shape == (3, VOCAB)
    assert logits.dtype == torch.float64
    assert runner.forward([Span(tokens(3), 0, [6], 0)]).shape == (0, VOCAB)
    assert rows == [3, 0]
    hook.remove()


def test_sequences_do_not_see_a_neighbour_full_of_nan():
    runner = ModelRunner(tiny_llama(), 8, BLOCK_SIZE)
    clean = runner.forward([Span(tokens(6), 0, [0, 1], 6)])
    for tensor in [*runner.cache.keys, *runner.cache.values]:
        tensor[2:] = float("nan")
    runner.forward([Span(tokens(3), 0, [2], 0)])
    both = runner.forward([Span(tokens(1, 3), 12, [2, 3, 4, 5], 1), Span(tokens(6), 0, [0, 1], 6)])
    assert both[0].isnan().all()
    assert_equal(both[1:], clean)


@pytest.mark.parametrize(
    ("span", "what"),
    [
        (Span([VOCAB], 0, [0], 1), "outside the vocabulary"),
        (Span([-1], 0, [0], 1), "outside the vocabulary"),
        (Span([1], 1024, list(range(8)) * 40, 1), "beyond the model's length"),
        (Span([1], 0, [8], 1), "outside the pool"),
        (Span([1], 0, [-1], 1), "outside the pool"),
    ],
)
def test_wrong_index_is_refused_before_it_reaches_a_tensor(span, what):
    runner = ModelRunner(tiny_llama(), 8, BLOCK_SIZE)
    before = runner.cache.keys[0].fill_(0.5).clone()  # fresh memory may hold NaN, which equals nothing
    with pytest.raises(EngineFailure, match=what):
        runner.forward([Span([1], 0, [1], 1), span])
    assert torch.equal(runner.cache.keys[0], before)
    assert runner.num_forwards == 0


def test_oracle_notices_a_wrong_value():
    """Negative control of the KV oracle."""
    runner = ModelRunner(tiny_llama(), 8, BLOCK_SIZE)
    sequence = Sequence(tokens(7), [4, 1], 7)
    runner.forward([Span(sequence.token_ids, 0, sequence.block_table, 0)])
    assert_kv_matches_fresh_prefill(runner, sequence)
    runner.cache.values[1][1, 2, 0, 3] += 1e-8
    with pytest.raises(AssertionError, match="values of layer 1"):
        assert_kv_matches_fresh_prefill(runner, sequence)
