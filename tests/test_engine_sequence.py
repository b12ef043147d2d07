import pytest

from shared.engine.block_allocator import BlockAllocator
from shared.engine.sequence import Sequence
from shared.errors import OutOfBlocks


def test_reserve_takes_only_the_missing_blocks():
    allocator = BlockAllocator(8, block_size=4)
    sequence = Sequence([1] * 5)
    sequence.reserve(5, allocator)
    assert len(sequence.block_table) == 2
    first = list(sequence.block_table)
    sequence.reserve(8, allocator)
    assert sequence.block_table == first
    sequence.reserve(9, allocator)
    assert sequence.block_table[:2] == first
    assert len(sequence.block_table) == 3


def test_failed_reserve_changes_nothing():
    allocator = BlockAllocator(3, block_size=4)
    sequence = Sequence([1] * 5)
    sequence.reserve(8, allocator)
    with pytest.raises(OutOfBlocks):
        sequence.reserve(17, allocator)
    assert len(sequence.block_table) == 2
    assert allocator.num_free == 1


def test_rewind_never_lengthens():
    sequence = Sequence([1] * 9, kv_len=6)
    sequence.rewind(8)
    assert sequence.kv_len == 6
    sequence.rewind(2)
    assert sequence.kv_len == 2
    sequence.rewind(-1)
    assert sequence.kv_len == 0


def test_rewind_keeps_the_blocks():
    allocator = BlockAllocator(4, block_size=4)
    sequence = Sequence([1] * 9)
    sequence.reserve(12, allocator)
    table = list(sequence.block_table)
    sequence.kv_len = 9
    sequence.rewind(1)
    assert sequence.block_table == table
    allocator.check_integrity([table])


def test_release_gives_all_back_and_keeps_the_tokens():
    allocator = BlockAllocator(4, block_size=4)
    sequence = Sequence([1, 2, 3], kv_len=0)
    sequence.reserve(16, allocator)
    sequence.kv_len = 3
    sequence.release(allocator)
    assert (sequence.block_table, sequence.kv_len, sequence.token_ids) == ([], 0, [1, 2, 3])
    assert allocator.num_free == 4
    sequence.release(allocator)
    allocator.check_integrity([])
