"""BlockManager: the pool of blocks, with reference counts and the order of eviction. It knows no sequences and no tokens.

    unbacked --grow--> free --allocate--> active --release(keep=True)--> cached --evict--> free
                        ^                   |  ^                            |
                        |--release(False)---+  +----------lock--------------+
                        +--inherit, at the start only: KV of an engine before--> cached

Order of preference for a new block: free, then growth of the backed part of the pool, then eviction of the cached block of the
lowest priority that was used least recently. Invariant: free + cached + active == num_blocks, where free counts the unbacked
ones too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from backend.api.request import DEFAULT_RETENTION_PRIORITY
from backend.core.step import BlockId
from backend.kvcache.block import DROPPED, Block, BlockHandle
from backend.kvcache.eviction import EvictionOrder


class OutOfBlocks(RuntimeError):
    """No block is free or evictable, so the plan that asked for one was wrong."""


class BlockManager:
    def __init__(
        self, num_blocks: int, chunk_blocks: int = -1, on_evict: Callable[[BlockId], None] = lambda block_id: None
    ) -> None:
        """`chunk_blocks`: how many blocks get memory at a time; -1 all at once, 0 the square root of `num_blocks`."""
        self.num_blocks = num_blocks
        self.chunk_blocks = {-1: num_blocks, 0: max(1, math.isqrt(num_blocks))}.get(chunk_blocks, chunk_blocks)
        self.blocks: list[Block] = []  # blocks that are backed by memory
        self._free: list[BlockId] = []
        self._cached = EvictionOrder()
        self.has_priorities = False  # True once any block has got a priority of its own
        self._num_active = 0
        self._next_unique_id = 1
        self._on_evict = on_evict
        self.num_allocated_total = 0
        self.num_evicted_total = 0
        self._grow()

    @property
    def num_backed(self) -> int:
        """Blocks that have memory; block tables use the ids 0 .. num_backed - 1."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._num_active - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_active(self) -> int:
        return self._num_active

    @property
    def num_available(self) -> int:
        """Blocks that a plan may use: free ones and evictable ones."""
        return self.num_blocks - self._num_active

    def ref_count(self, block_id: BlockId) -> int:
        """Running sequences that use the block."""
        return self.blocks[block_id].ref_count

    def is_shareable(self, block_id: BlockId) -> bool:
        """True if other block tables may refer to the block, so that it must be copied before a write."""
        return self.blocks[block_id].is_shareable

    def is_current(self, handle: BlockHandle) -> bool:
        """True if the block still holds the content for which the handle was made."""
        return self.blocks[handle.block_id].unique_id == handle.unique_id

    def allocate(self) -> Block:
        """Return a block with ref_count 1 and a fresh unique id; may grow the pool or evict. Raises OutOfBlocks."""
        if not self._free:
            self._grow()
        if not self._free:
            self.evict_first()
        block = self.blocks[self._free.pop()]
        block.ref_count = 1
        block.unique_id = self._next_unique_id
        self._next_unique_id += 1
        self._num_active += 1
        self.num_allocated_total += 1
        return block

    def inherit(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockHandle]:
        """Make free blocks cached: they hold KV of an engine before this one. The first of them are evicted first."""
        while block_ids and max(block_ids) >= len(self.blocks):
            self._grow()
        taken = set(block_ids)
        self._free = [block_id for block_id in self._free if block_id not in taken]
        for block_id in block_ids:
            self.blocks[block_id].unique_id = self._next_unique_id
            self._next_unique_id += 1
            self._cached.add(self.blocks[block_id])
        return {block_id: self.blocks[block_id].handle for block_id in block_ids}

    def lock(self, block_id: BlockId) -> None:
        """Add a reference to a block that is cached or active."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            self._cached.remove(block)
            self._num_active += 1
        block.ref_count += 1

    def mark_shareable(self, handles: Iterable[BlockHandle]) -> None:
        """Let other block tables refer to these blocks, until their content is lost."""
        for handle in handles:
            if handle is not DROPPED:
                self.blocks[handle.block_id].is_shareable = True

    def release(self, block_id: BlockId, keep: bool) -> None:
        """Drop a reference. Without references a block is cached, as the most recently used, or free. Raises on a double free."""
        block = self.blocks[block_id]
        if block.ref_count <= 0:
            raise RuntimeError(f"block {block_id} is released more often than it was locked")
        block.ref_count -= 1
        if block.ref_count:
            return
        self._num_active -= 1
        if keep:
            self._cached.add(block)
        else:
            self._clear(block)

    def verify(self, handles: Iterable[BlockHandle]) -> int:
        """Return how many handles from the front still refer to unchanged content. Dropped entries count as unchanged."""
        survived = 0
        for handle in handles:
            if handle is not DROPPED and not self.is_current(handle):
                break
            survived += 1
        return survived

    def discard(self, block_id: BlockId) -> None:
        """Turn a cached block whose content can no longer be found into a free one."""
        block = self.blocks[block_id]
        if block in self._cached:
            self._cached.remove(block)
            self._clear(block)

    def retain(self, block_id: BlockId, priority: int, until_ns: int | None) -> None:
        """Set the priority of an active block in the order of eviction, and the time when it lapses."""
        block = self.blocks[block_id]
        block.priority, block.lapse = priority, None
        self.has_priorities = True
        if until_ns is not None:
            self._cached.note_lapse(block, until_ns)

    def lapse(self, now_ns: int) -> list[BlockId]:
        """Reset priorities that have lapsed. Returns their blocks; cached ones become the most recently used."""
        changed = []
        for lapse, block_id in self._cached.lapsed(now_ns):
            block = self.blocks[block_id]
            if block.lapse != lapse:
                continue
            is_cached = block in self._cached
            if is_cached:
                self._cached.remove(block)
            block.priority, block.lapse = DEFAULT_RETENTION_PRIORITY, None
            if is_cached:
                self._cached.add(block)
            changed.append(block_id)
        return changed

    def check_integrity(self) -> None:
        """Raise AssertionError, with the equation, if the counts of blocks are inconsistent."""
        free, cached, active = self.num_free, self.num_cached, self.num_active
        counted = sum(1 for block in self.blocks if block.ref_count)
        assert counted == active, f"active {active} != {counted} blocks with references"
        assert free >= 0 and free + cached + active == self.num_blocks, (
            f"free {free} + cached {cached} + active {active} != num_blocks {self.num_blocks}"
        )
        backed = len(self._free) + cached + active
        assert backed == len(self.blocks), f"{backed} blocks in the books, {len(self.blocks)} are backed"
        for block_id in self._cached:
            block = self.blocks[block_id]
            assert block.ref_count == 0 and block.unique_id, f"cached block {block_id} is not idle or holds nothing"
        for block_id in self._free:
            block = self.blocks[block_id]
            assert block.ref_count == 0 and not block.unique_id, f"free block {block_id} is held or holds something"

    def _grow(self) -> None:
        room = self.num_blocks - len(self.blocks)
        for _ in range(min(self.chunk_blocks, room)):
            self.blocks.append(Block(BlockId(len(self.blocks))))
            self._free.append(self.blocks[-1].block_id)

    def evict_first(self) -> None:
        """Evict the cached block that comes first in the order of eviction. Raises OutOfBlocks if nothing is cached."""
        block_id = self._cached.first()
        if block_id is None:
            raise OutOfBlocks(f"all {self.num_blocks} KV blocks are in use by running sequences")
        block = self.blocks[block_id]
        self._cached.remove(block)
        self.num_evicted_total += 1
        self._clear(block)

    def _clear(self, block: Block) -> None:
        block.unique_id = 0
        block.is_shareable = False
        block.priority, block.lapse = DEFAULT_RETENTION_PRIORITY, None
        self._free.append(block.block_id)
        self._on_evict(block.block_id)
