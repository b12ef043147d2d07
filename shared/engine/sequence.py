"""One sequence as the engine holds it: its tokens, its blocks and how far its KV goes. It does not know requests, drafts or time."""

from dataclasses import dataclass, field

from shared.engine.block_allocator import BlockAllocator


@dataclass(slots=True)
class Sequence:
    """Tokens and the blocks that hold their keys and values.

    Args:
        token_ids: all tokens, in order.
        block_table: block of positions [i * block_size, (i + 1) * block_size) at index i; may reach beyond the tokens.
        kv_len: positions below it have valid keys and values; whatever lies beyond is overwritten before it is read.
        salt: sequences of different salts never share a block; see `shared.engine.prefix_cache`, as for the next two.
        block_keys: names of the first blocks' content, as far as they were asked for.
        num_kept: so many first blocks may be shared; nothing is ever written to them.
    """

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    kv_len: int = 0
    salt: bytes = b""
    block_keys: list[bytes] = field(default_factory=list)
    num_kept: int = 0

    def reserve(self, num_tokens: int, allocator: BlockAllocator) -> None:
        """Grows the block table so that all positions below `num_tokens` have slots (lookahead included).

        Raises:
            OutOfBlocks: the pool is too empty; nothing was changed.
        """
        missing = allocator.blocks_for(num_tokens) - len(self.block_table)
        if missing > 0:
            self.block_table.extend(allocator.allocate(missing))

    def trim(self, num_tokens: int, allocator: BlockAllocator) -> None:
        """Gives back the blocks that no position below `num_tokens` needs: lookahead."""
        first = allocator.blocks_for(num_tokens)
        if first < len(self.block_table):
            allocator.release(self.block_table[first:])
            del self.block_table[first:]

    def rewind(self, kv_len: int) -> None:
        """Forgets keys and values from position `kv_len` on. Rollback is a length: the blocks stay for the tokens to come."""
        self.kv_len = max(0, min(self.kv_len, kv_len))

    def release(self, allocator: BlockAllocator) -> None:
        """Gives all blocks back. The tokens stay, so the sequence can be computed again."""
        allocator.release(self.block_table)
        self.block_table = []
        self.kv_len = self.num_kept = 0
