"""Who holds which block of the KV pool: a free list and a reference count per block. It does not know what a block contains.

A block may be *kept*: when its last holder goes, its content stays until the block is needed. Then the one that nobody has held for the
longest goes first; holders release their last blocks first, so of a chain of blocks the end goes before what it builds on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from shared.errors import OutOfBlocks


class BrokenInvariant(AssertionError):
    """The books of the block pool do not balance; the text names the invariant."""


class BlockAllocator:
    """Hands out blocks of a fixed pool, the last one released first, so that warm memory is used again.

    Args:
        num_blocks: size of the pool; ids are 0 to num_blocks - 1.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._reference_counts = [0] * num_blocks
        self._kept: set[int] = set()
        self._cached: dict[int, None] = {}  # kept ones that nobody holds, the one released first at the head
        self.on_evict: Callable[[int], None] = lambda block: None  # told of each kept block whose content is given up

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is still there."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks, each with one holder; cached ones only when there are no others.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} free")
        while len(self._free) < num_blocks:
            self._evict()
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each of the blocks.

        Raises:
            BrokenInvariant: one of them has no holder and is not cached, so its content is nobody's; nothing was changed.
        """
        self._check_held([block for block in blocks if block not in self._cached], "shared")
        for block in blocks:
            self._cached.pop(block, None)
            self._reference_counts[block] += 1

    def keep(self, block: int) -> None:
        """Has the content of a held block outlive its holders, until the block is needed.

        Raises:
            BrokenInvariant: nobody holds it; nothing was changed.
        """
        self._check_held([block], "kept")
        self._kept.add(block)

    def is_held(self, block: int) -> bool:
        """Whether the block has a holder."""
        return self._reference_counts[block] > 0

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each of the blocks; the ones without any become free, or cached if they are kept.

        Raises:
            BrokenInvariant: one of them would be released more often than it is held; nothing was changed.
        """
        self._check_held(blocks, "released")
        # From the end, so that the next owner gets the blocks in the order in which this one had them.
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] > 0:
                continue
            if block in self._kept:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the books with the block tables of all holders. Cheap enough to run when the engine is idle.

        Args:
            tables: the block table of every live holder.

        Raises:
            BrokenInvariant: they differ.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise BrokenInvariant("a block is free at most once: the free list repeats a block")
        held = {block for block, count in enumerate(self._reference_counts) if count > 0}
        cached = self._cached.keys()
        if len(free | cached | held) != self.num_blocks or len(free) + len(cached) + len(held) != self.num_blocks:
            sizes = f"{len(free)} free, {len(cached)} cached and {len(held)} used of {self.num_blocks} blocks"
            raise BrokenInvariant(f"free + cached + used = total: {sizes}")
        if not cached <= self._kept or free & self._kept:
            raise BrokenInvariant("a block that nobody holds is cached if and only if it is kept")
        holders = Counter(block for table in tables for block in table)
        for block in holders.keys() | held:
            count = self._reference_counts[block] if 0 <= block < self.num_blocks else 0
            if holders[block] != count:
                claim = f"block {block} is counted {count} times and held {holders[block]} times"
                raise BrokenInvariant(f"reference count = number of tables that hold a block: {claim}")

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        self._kept.remove(block)
        self._free.append(block)
        self.on_evict(block)

    def _check_held(self, blocks: Sequence[int], verb: str) -> None:
        for block, times in Counter(blocks).items():
            count = self._reference_counts[block] if 0 <= block < self.num_blocks else 0
            if count == 0 or (verb == "released" and times > count):
                raise BrokenInvariant(f"only a held block can be {verb}: block {block} has {count} holders")
