"""BlockTable: which blocks hold the KV of one sequence, in the order of its positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.core.step import BlockId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.prefix_trie import TrieNode


def count_dropped(handles: Iterable[BlockHandle]) -> int:
    """Entries whose block has been let go."""
    return sum(handle is DROPPED for handle in handles)


@dataclass(slots=True)
class BlockTable:
    """Written by the KVCacheManager alone.

    Entries that have left the sliding window are DROPPED: one gap, behind the entries that hold sink tokens (geometry.py).
    """

    handles: list[BlockHandle] = field(default_factory=list)
    is_locked: bool = False  # its blocks carry references: the sequence is running
    num_dropped: int = 0
    node: TrieNode | None = None  # where the trie knows the newest full block; None = look it up from the root
    depth: int = 0  # blocks entered into the trie

    @property
    def num_held(self) -> int:
        """Entries that name a block."""
        return len(self.handles) - self.num_dropped

    def block_ids(self) -> list[BlockId]:
        """The table as a worker reads it; -1 where the window has let a block go."""
        return [handle.block_id for handle in self.handles]

    def held(self) -> list[BlockHandle]:
        """The entries that name a block, in order."""
        return [handle for handle in self.handles if handle is not DROPPED]

    def cut(self, num_entries: int) -> list[BlockHandle]:
        """Keep the first entries; return the others."""
        cut = self.handles[num_entries:]
        del self.handles[num_entries:]
        self.num_dropped = count_dropped(self.handles)
        self.node, self.depth = None, 0
        return cut
