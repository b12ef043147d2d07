import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.block_allocator import BlockAllocator, BrokenInvariant
from shared.engine.sequence import Sequence
from shared.errors import OutOfBlocks

NUM_BLOCKS = 12
OPERATION = st.tuples(st.sampled_from(["open", "reserve", "rewind", "share", "release"]), st.integers(0, 7), st.integers(0, 30))


@given(st.lists(OPERATION, max_size=60))
def test_books_balance_after_any_operations(operations):
    allocator = BlockAllocator(NUM_BLOCKS, block_size=4)
    live = []
    for name, index, size in operations:
        sequence = live[index % len(live)] if live else None
        if name == "open" or sequence is None:
            live.append(Sequence([1] * size))
        elif name == "reserve":
            before = list(sequence.block_table)
            num_free = allocator.num_free
            try:
                sequence.reserve(size, allocator)
                assert len(sequence.block_table) * 4 >= size
            except OutOfBlocks:
                assert sequence.block_table == before
                assert allocator.num_free == num_free
        elif name == "rewind":
            sequence.rewind(size)
        elif name == "share":
            allocator.share(sequence.block_table)
            live.append(Sequence(list(sequence.token_ids), list(sequence.block_table), sequence.kv_len))
        else:
            sequence.release(allocator)
            live.remove(sequence)
        allocator.check_integrity(sequence.block_table for sequence in live)
        assert allocator.num_used == len({block for sequence in live for block in sequence.block_table})
    for sequence in live:
        sequence.release(allocator)
    allocator.check_integrity([])
    assert allocator.num_free == NUM_BLOCKS


def test_blocks_are_handed_out_once():
    allocator = BlockAllocator(6, 4)
    assert sorted(allocator.allocate(2) + allocator.allocate(4)) == list(range(6))
    assert allocator.num_free == 0


def test_last_released_blocks_are_handed_out_first():
    allocator = BlockAllocator(8, 4)
    first, second = allocator.allocate(3), allocator.allocate(3)
    allocator.release(first)
    allocator.release(second)
    assert allocator.allocate(3) == second
    assert allocator.allocate(3) == first


def test_too_large_a_request_takes_nothing():
    allocator = BlockAllocator(4, 4)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 of 4 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


def test_shared_block_is_freed_by_its_last_holder():
    allocator = BlockAllocator(4, 4)
    table = allocator.allocate(2)
    allocator.share(table[:1])
    allocator.release(table)
    assert allocator.num_used == 1
    allocator.check_integrity([table[:1]])
    allocator.release(table[:1])
    assert allocator.num_used == 0


@pytest.mark.parametrize("again", [lambda table: table, lambda table: [table[0], table[0]], lambda table: [table[1], 99]])
def test_release_beyond_what_is_held_changes_nothing(again):
    allocator = BlockAllocator(4, 4)
    table = allocator.allocate(2)
    release = again(table)
    if release == table:
        allocator.release(table)
    num_used = allocator.num_used
    with pytest.raises(BrokenInvariant, match="only a held block can be released"):
        allocator.release(release)
    assert allocator.num_used == num_used


def test_free_block_cannot_be_shared():
    with pytest.raises(BrokenInvariant, match="only a held block can be shared"):
        BlockAllocator(4, 4).share([0])


@pytest.mark.parametrize(
    "claim",
    [lambda _: [], lambda table: [table[:1]], lambda table: [table, table], lambda table: [[*table, 3]], lambda table: [[*table, 9]]],
    ids=["leaked", "partly leaked", "held twice", "free but held", "outside the pool"],
)
def test_integrity_check_names_the_broken_invariant(claim):
    allocator = BlockAllocator(4, 4)
    table = allocator.allocate(2)
    with pytest.raises(BrokenInvariant, match="reference count = number of tables that hold a block"):
        allocator.check_integrity(claim(table))
    allocator.check_integrity([table])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 16)])
def test_empty_pool_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="at least one block of one token"):
        BlockAllocator(num_blocks, block_size)


def test_negative_request_is_refused():
    with pytest.raises(ValueError, match="cannot allocate -1 blocks"):
        BlockAllocator(4, 4).allocate(-1)
