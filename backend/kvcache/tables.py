"""BlockTable: the blocks that hold the KV of one sequence, in the order of its positions. Grant: what a plan gives to one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.core.sequence import Sequence
from backend.core.step import BlockId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.prefix_trie import TrieNode

if TYPE_CHECKING:
    from backend.kvcache.states import Snapshot


def count_dropped(handles: Iterable[BlockHandle]) -> int:
    """The number of entries whose block has been released."""
    return sum(handle is DROPPED for handle in handles)


@dataclass(slots=True)
class BlockTable:
    """Written by the KVCacheManager only.

    Entries outside the sliding window are DROPPED. They form one gap, behind the entries of sink tokens (geometry.py).
    """

    handles: list[BlockHandle] = field(default_factory=list)
    is_locked: bool = False  # True while the sequence runs: its blocks are referenced
    num_dropped: int = 0
    node: TrieNode | None = None  # the trie's node of the newest full block; None = search from the root
    depth: int = 0  # number of blocks inserted into the trie
    num_matched: int = (
        0  # blocks that were in the cache when the sequence was admitted, with a state behind them or not
    )
    passing: Snapshot | None = None  # the newest snapshot of its state, which the next one replaces

    @property
    def num_held(self) -> int:
        """The number of entries that refer to a block."""
        return len(self.handles) - self.num_dropped

    def block_ids(self) -> list[BlockId]:
        """The table as a worker reads it, with -1 for blocks that the sliding window has released."""
        return [handle.block_id for handle in self.handles]

    def held(self) -> list[BlockHandle]:
        """The entries that refer to a block, in order."""
        return [handle for handle in self.handles if handle is not DROPPED]

    def cut(self, num_entries: int) -> list[BlockHandle]:
        """Keep the first entries; return the others."""
        cut = self.handles[num_entries:]
        del self.handles[num_entries:]
        self.num_dropped = count_dropped(self.handles)
        self.node, self.depth = None, 0
        return cut


@dataclass(slots=True)
class Grant:
    """The blocks, and perhaps the slot, that one sequence gets in this plan."""

    seq: Sequence
    admitted: bool  # True: it gets a slot, and its table is `kept` + new blocks. False: its table is extended
    num_new: int
    computed: int = 0  # admitted: tokens whose KV (and state, where the model has one) was found in the cache
    own: int = 0  # admitted: the part of `computed` that may be reported to the client
    kept: list[BlockHandle] = field(default_factory=list)  # admitted: blocks found in the cache, in table order
    copy_from: BlockHandle | None = None  # source of the first new block's content (copy on write, partial match)
    lost: int = (
        0  # written by commit if admitted: tokens behind `computed` whose KV was cached once and has been evicted
    )
    own_lost: int = 0  # the part of `lost` that may be reported to the client
    swapped: list[int] = field(default_factory=list)  # admitted: places from which the first new blocks are swapped in
    replaces: int | None = None  # extended: index of the table entry that the copy replaces
    num_matched: int = 0  # admitted: blocks found in the cache, those without a state included

    @property
    def num_held(self) -> int:
        """Blocks that an admitted sequence holds when the plan is committed."""
        return self.num_new + len(self.kept) - count_dropped(self.kept)
