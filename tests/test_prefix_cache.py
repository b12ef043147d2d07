"""What may be shared between sequences, and that sharing changes no token."""

import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shared.engine.block_allocator import BlockAllocator, BrokenInvariant
from shared.engine.prefix_cache import PrefixCache
from shared.engine.sequence import Sequence
from shared.errors import CorruptOutput, OutOfBlocks
from shared.sampling import Mode, SamplingParams
from tests.support.tiny_models import tiny_llama
from tests.support.virtual_pair import VirtualPair
from tests.test_exactness_virtual import ORACLE, SAMPLINGS, TARGET, check_after_step, make_drafter
from verifier_service.request import Request, Stopping

BLOCK_SIZE = 4


def books(num_blocks: int = 8) -> tuple[BlockAllocator, PrefixCache]:
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
    return allocator, PrefixCache(allocator)


def computed(token_ids: list[int], allocator: BlockAllocator, cache: PrefixCache, salt: bytes = b"") -> Sequence:
    """A sequence of which all but the last token has been computed, and what is full kept."""
    sequence = Sequence(list(token_ids), salt=salt)
    cache.take(sequence, cache.find(sequence))
    sequence.reserve(len(token_ids), allocator)
    sequence.kv_len = len(token_ids) - 1
    cache.keep(sequence)
    return sequence


def test_the_longest_known_beginning_is_found():
    allocator, cache = books()
    first = computed([*range(10), 50], allocator, cache)
    assert cache.find(Sequence([*range(10), 50])) == first.block_table[:2]
    assert cache.find(Sequence([*range(7), 60, 61, 62])) == first.block_table[:1]
    assert cache.find(Sequence([9, *range(10)])) == []


def test_the_same_tokens_behind_another_beginning_are_another_text():
    allocator, cache = books()
    computed([*range(8), 50], allocator, cache)
    other = computed([9, 9, 9, 9, 60], allocator, cache)
    assert cache.find(Sequence([9, 9, 9, 9, 4, 5, 6, 7, 8])) == other.block_table[:1]


@pytest.mark.parametrize(("length", "num_blocks"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_always_runs(length, num_blocks):
    allocator, cache = books()
    computed(list(range(13)), allocator, cache)
    sequence = Sequence(list(range(length)))
    cache.take(sequence, cache.find(sequence))
    assert len(sequence.block_table) == num_blocks
    assert sequence.kv_len == num_blocks * BLOCK_SIZE < length


def test_a_block_is_kept_once_it_is_full_and_computed():
    allocator, cache = books()
    sequence = Sequence(list(range(8)))
    sequence.reserve(8, allocator)
    for kv_len, num_kept in ((3, 0), (4, 1), (7, 1), (8, 2)):
        sequence.kv_len = kv_len
        cache.keep(sequence)
        assert sequence.num_kept == num_kept
        assert len(cache.find(Sequence([*range(8), 9]))) == num_kept


def test_blocks_with_room_and_guesses_are_free_when_their_sequence_ends():
    allocator, cache = books()
    sequence = Sequence(list(range(6)))
    sequence.reserve(6 + 5, allocator)  # the third block has nothing but guesses
    sequence.kv_len = 5
    cache.keep(sequence)
    sequence.release(allocator)
    assert (allocator.num_free, allocator.num_cached) == (8, 1)
    cache.check_integrity([])
    allocator.check_integrity([])


def test_tenants_never_find_each_others_blocks():
    allocator, cache = books()
    computed(list(range(9)), allocator, cache, salt=b"a")
    assert cache.find(Sequence(list(range(9)), salt=b"a"))
    assert not cache.find(Sequence(list(range(9)), salt=b"b"))
    assert not cache.find(Sequence(list(range(9))))


def test_a_sequence_changes_over_to_a_block_of_the_same_content():
    """Two that began at the same time have computed the same: the block of the second is free again."""
    allocator, cache = books()
    one, two = (Sequence(list(range(6))) for _ in range(2))
    for sequence in (one, two):
        sequence.reserve(6, allocator)
        sequence.kv_len = 5
    cache.keep(one)
    cache.keep(two)
    assert two.block_table[0] == one.block_table[0]
    assert two.block_table[1] != one.block_table[1]
    assert allocator.num_free == 8 - 3
    cache.check_integrity([one, two])
    allocator.check_integrity([one.block_table, two.block_table])


def test_of_a_text_the_end_goes_first_and_the_oldest_text_before_others():
    allocator, cache = books(num_blocks=5)
    old, new = [*range(8), 0], [*range(20, 24), 0]
    for token_ids in (old, new):
        computed(token_ids, allocator, cache).release(allocator)
    left = []
    for num_blocks in (2, 1, 1, 1):  # the first two have nothing in them
        allocator.allocate(num_blocks)
        left.append((len(cache.find(Sequence(old))), len(cache.find(Sequence(new)))))
    assert left == [(2, 1), (1, 1), (0, 1), (0, 0)]
    cache.check_integrity([])


def test_what_is_held_is_never_given_up():
    allocator, cache = books(num_blocks=3)
    sequence = computed(list(range(9)), allocator, cache)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    assert len(cache.find(Sequence(list(range(9))))) == 2
    cache.check_integrity([sequence])


def test_switched_off_it_keeps_and_finds_nothing():
    allocator = BlockAllocator(8, BLOCK_SIZE)
    cache = PrefixCache(allocator, enabled=False)
    computed(list(range(9)), allocator, cache).release(allocator)
    assert cache.find(Sequence(list(range(9)))) == []
    assert (allocator.num_cached, allocator.num_free) == (0, 8)


def test_a_kept_block_that_could_still_change_is_noticed():
    """The negative control of the check."""
    allocator, cache = books()
    sequence = computed(list(range(9)), allocator, cache)
    sequence.rewind(5)
    with pytest.raises(BrokenInvariant, match="only full blocks"):
        cache.check_integrity([sequence])


def test_names_are_computed_once():
    allocator, cache = books()
    sequence = computed(list(range(9)), allocator, cache)
    names = list(sequence.block_keys)
    sequence.release(allocator)
    assert cache.find(sequence)
    assert all(before is after for before, after in zip(names, sequence.block_keys, strict=True))


# --- Through the engine

_beginnings = st.tuples(st.integers(0, 1), st.integers(1, 20))


def _ask(index: int, drawn: tuple[tuple[int, int], list[int], int, str, int], sampling: SamplingParams, mode: Mode = Mode.COUPLED) -> Request:
    (family, length), rest, max_tokens, tenant, priority = drawn
    prompt = [(family * 31 + position * 7) % 64 for position in range(length)]
    stopping = Stopping(max_tokens)
    return Request(f"r{index}", (*prompt, *rest), sampling, stopping, 7, mode=mode, max_draft_tokens=4, priority=priority, tenant=tenant)


_asked = st.tuples(
    _beginnings, st.lists(st.integers(0, 63), max_size=3), st.integers(1, 14), st.sampled_from(["", "", "a"]), st.sampled_from([0, 0, 3, -3])
)


@settings(max_examples=40)
@given(
    drawn=st.lists(_asked, min_size=2, max_size=7),
    starts=st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3]), min_size=7, max_size=7),
    sampling=st.sampled_from(SAMPLINGS),
    drafter=st.sampled_from(["perfect", "lying", "noisy"]),
    num_blocks=st.sampled_from([64, 20, 10]),
    scorer=st.sampled_from(["expanded", "multi_query"]),
)
def test_shared_beginnings_change_no_token(drawn, starts, sampling, drafter, num_blocks, scorer):
    """In float64, against plain decoding of one request at a time, and with every sequence's KV compared with a fresh prefill."""
    pair = VirtualPair(TARGET, num_blocks=num_blocks, block_size=BLOCK_SIZE, scorer=scorer, max_step_tokens=24)
    pair.on_step = lambda: check_after_step(pair)
    pair.attach(*make_drafter(drafter))
    asked = [_ask(index, one, sampling) for index, one in enumerate(drawn)]
    for start, request in zip(starts[1:], asked[1:], strict=False):
        pair.at(start, lambda request=request: pair.submit(request))
    pair.run(asked[0])
    pair.drain()
    outputs = pair.run()
    assert outputs == {request.request_id: ORACLE.tokens(request) for request in asked}
    assert pair.allocator.num_free == num_blocks
    event(f"cached: {any(output.stats.cached_tokens for output in pair.outputs)}")
    event(f"preempted: {any(output.stats.preempted for output in pair.outputs)}")


def test_tokens_are_the_same_with_the_cache_on_and_off_in_float32():
    model = tiny_llama(dtype=torch.float32)
    rows = [((index % 2, 17), [index % 3], 12, "a" if index % 4 == 3 else "", index % 2) for index in range(12)]
    outputs, cached, computed_tokens = {}, {}, {}
    for prefix_cache in (True, False):
        pair = VirtualPair(model, num_blocks=48, block_size=BLOCK_SIZE, max_running=4, prefix_cache=prefix_cache)
        pair.attach(*make_drafter("lying"))
        asked = [_ask(index, row, SamplingParams(), mode) for index, (row, mode) in enumerate(zip(rows, [*Mode] * 6, strict=True))]
        tokens = pair.run(*asked)
        # In rejection mode the tokens depend on which guesses were there in time; those requests take part, but prove nothing here.
        outputs[prefix_cache] = {request.request_id: tokens[request.request_id] for request in asked if request.mode is Mode.COUPLED}
        cached[prefix_cache] = sum(emission.cached_prompt_tokens for emission in pair.finished.values())
        computed_tokens[prefix_cache] = sum(output.stats.prefill_tokens for output in pair.outputs)
    assert outputs[True] == outputs[False]
    assert cached[False] == 0 < cached[True]
    assert computed_tokens[True] < computed_tokens[False]


def test_a_second_request_is_told_how_much_was_there():
    pair = VirtualPair(TARGET, block_size=BLOCK_SIZE)
    first, second, other = (_ask(index, ((0, 18), [index], 3, tenant, 0), SamplingParams()) for index, tenant in enumerate(["a", "a", "b"]))
    for request in (first, second, other):
        pair.run(request)
    assert [pair.finished[request.request_id].cached_prompt_tokens for request in (first, second, other)] == [0, 16, 0]
    assert sum(output.stats.queried_tokens for output in pair.outputs) == 3 * 19
    assert pair.outputs[-1].stats.cached_blocks == pair.allocator.num_cached > 0


def test_what_a_failed_request_has_left_behind_is_nobodys_beginning():
    """A chunk of a prompt picks no token: what its rows have stored is shown to others only once a row that reads it is found usable."""
    pair = VirtualPair(TARGET, block_size=BLOCK_SIZE, max_step_tokens=8)

    def spoil() -> None:
        for keys in pair.runner.cache.keys:
            keys.fill_(math.nan)

    pair.at_step(1, spoil)  # a fault of the machine after the first of three chunks
    first, second = (_ask(index, ((0, 18), [], 3, "", 0), SamplingParams()) for index in range(2))
    pair.run(first)
    assert isinstance(pair.finished["r0"].error, CorruptOutput)
    assert pair.run(second)["r1"] == ORACLE.tokens(second)
    assert pair.finished["r1"].cached_prompt_tokens == 0
