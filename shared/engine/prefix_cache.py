"""Blocks that can be used again, found by the text up to their end. It does not know who asks, only a salt that keeps strangers apart.

A block enters when it is full of tokens that stand and whose keys and values are computed: never with a guess in it, and never with a
position that will be written again. So a block that several sequences hold is read-only, and needs no copy on write. When a block of the same
content is there already, the sequence changes over to it, and its own is free.

The name of a block's content is BLAKE2b of its token ids, keyed with the name of the block before it; the chain starts with the salt. With 256
bits nobody finds two texts of one name, so text cannot leak from one to the other, as it could by a 64-bit hash.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from shared.engine.block_allocator import BlockAllocator, BrokenInvariant
from shared.engine.sequence import Sequence

_KEY_BYTES = 32


class PrefixCache:
    """Names of kept blocks.

    Args:
        allocator: the pool's books; this takes its `on_evict`.
        enabled: False keeps nothing and finds nothing.
    """

    def __init__(self, allocator: BlockAllocator, enabled: bool = True) -> None:
        self._allocator = allocator
        self._enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        allocator.on_evict = self._forget

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known beginning of a sequence without blocks. Its last token is never part of it: it has to run."""
        found: list[int] = []
        while self._enabled and (len(found) + 1) * self._allocator.block_size < len(sequence.token_ids):
            block = self._block_of.get(self._key(sequence, len(found)))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        """Starts a sequence without blocks on what `find` has found."""
        self._allocator.share(blocks)
        sequence.block_table = list(blocks)
        sequence.num_kept = len(blocks)
        sequence.kv_len = len(blocks) * self._allocator.block_size

    def keep(self, sequence: Sequence) -> None:
        """Keeps the blocks of a sequence that have become full. Call it only when positions below `kv_len` hold nothing but tokens that stand."""
        num_full = sequence.kv_len // self._allocator.block_size
        if not self._enabled or num_full <= sequence.num_kept:
            return
        for index in range(sequence.num_kept, num_full):
            key, block = self._key(sequence, index), sequence.block_table[index]
            known = self._block_of.setdefault(key, block)
            if known == block:
                self._key_of[block] = key
                self._allocator.keep(block)
            else:
                self._allocator.share([known])
                self._allocator.release([block])
                sequence.block_table[index] = known
        sequence.num_kept = num_full

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Checks that names and blocks match one to one, and that nothing in a kept block can still change.

        Args:
            sequences: every live one.

        Raises:
            BrokenInvariant: they do not, or it can.
        """
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise BrokenInvariant("each name has one block, and each kept block one name")
        for sequence in sequences:
            if sequence.num_kept > sequence.kv_len // self._allocator.block_size:
                raise BrokenInvariant("only full blocks whose keys and values are computed are kept")
            for index, block in enumerate(sequence.block_table):
                if self._key_of.get(block) != (self._key(sequence, index) if self._enabled and index < sequence.num_kept else None):
                    raise BrokenInvariant(f"block {block} is held as block {index} of a text that is not its own, or that may still change")

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Name of a block's content; each is computed once in a sequence's life."""
        keys, size = sequence.block_keys, self._allocator.block_size
        while len(keys) <= index:
            parent = keys[-1] if keys else blake2b(sequence.salt, digest_size=_KEY_BYTES).digest()
            token_ids = array("q", sequence.token_ids[len(keys) * size : (len(keys) + 1) * size])
            keys.append(blake2b(token_ids.tobytes(), key=parent, digest_size=_KEY_BYTES).digest())
        return keys[index]

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
