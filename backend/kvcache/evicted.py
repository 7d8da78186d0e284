"""EvictedPrefixes: remembers prefixes that were evicted, so that a conversation that returns is counted as an eviction.

A conversation without a session sends its whole history as a new request each turn, so only the tokens show that their KV was
cached before. Each evicted block is remembered by its hash, which covers all tokens up to its end (events.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backend.kvcache.events import block_hash

BLOCKS_REMEMBERED = 8  # hashes kept for each block of the pool: conversations of 8 times its size are recognised
MAX_REMEMBERED = 1 << 17  # about 12 MB


class EvictedPrefixes:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: size of the pool."""
        self._max_blocks = min(MAX_REMEMBERED, BLOCKS_REMEMBERED * num_blocks)
        self._hashes: dict[int, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hashes: Iterable[int]) -> None:
        """Remember evicted blocks. Beyond the bound the oldest are forgotten."""
        for each in block_hashes:
            self._hashes.pop(each, None)
            self._hashes[each] = None
        while len(self._hashes) > self._max_blocks:
            del self._hashes[next(iter(self._hashes))]

    def discard(self, block_hash: int) -> None:
        """Forget a block that is cached again."""
        self._hashes.pop(block_hash, None)

    def num_blocks_after(self, parent_hash: int, token_ids: Sequence[int], start: int, stop: int, size: int) -> int:
        """The number of evicted blocks that hold token_ids[start:stop], `size` tokens each, behind the block `parent_hash`."""
        count = 0
        if not self._hashes:
            return count
        for end in range(start + size, stop + 1, size):
            parent_hash = block_hash(parent_hash, token_ids[end - size : end])
            if parent_hash not in self._hashes:
                break
            count += 1
        return count
