"""EvictionOrder: the order in which cached blocks are evicted: lowest priority first, least recently used within a priority.

After TensorRT-LLM's prioritised LRU: the request that used a block last sets its priority (`RetentionConfig`), until that lapses.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from backend.api.request import DEFAULT_RETENTION_PRIORITY
from backend.core.step import BlockId
from backend.kvcache.block import Block


class Retained(NamedTuple):
    """A block's priority and the time when it lapses (nanoseconds; None = never)."""

    priority: int
    until_ns: int | None

    def before(self, own: Retained) -> Retained:
        """The retention of the block ahead of this one, which asks for `own` itself: at least that of this block."""
        if own.priority < self.priority:
            return self
        if self.priority <= DEFAULT_RETENTION_PRIORITY:
            return own
        ends = (own.until_ns, self.until_ns)
        return Retained(own.priority, None if None in ends else max(end for end in ends if end is not None))


class EvictionOrder:
    """The cached blocks. There is one LRU list for each priority that occurs."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[BlockId, None]] = {DEFAULT_RETENTION_PRIORITY: OrderedDict()}
        self._lapses: list[tuple[int, int, BlockId]] = []  # heap: nanoseconds, number, block
        self._num_noted = 0
        self._default = self._levels[DEFAULT_RETENTION_PRIORITY]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BlockId]:
        """Yield the blocks in the order of eviction."""
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    def __contains__(self, block: Block) -> bool:
        return block.block_id in self._levels.get(block.priority, ())

    def add(self, block: Block) -> None:
        """Add a block that is now cached, as the most recently used of its priority."""
        self._level(block.priority)[block.block_id] = None
        self._size += 1

    def remove(self, block: Block) -> None:
        level = self._levels[block.priority]
        del level[block.block_id]
        self._size -= 1
        if not level and level is not self._default:
            del self._levels[block.priority]

    def first(self) -> BlockId | None:
        """The block to evict next; None if there is none."""
        if not self._size:
            return None
        level = self._default if len(self._levels) == 1 else self._levels[min(p for p, b in self._levels.items() if b)]
        return next(iter(level))

    def note_lapse(self, block: Block, until_ns: int) -> None:
        """Note when the priority of a block lapses. Priorities that lapse at the same time do so in the order of these calls."""
        block.lapse = (until_ns, self._num_noted)
        heapq.heappush(self._lapses, (until_ns, self._num_noted, block.block_id))
        self._num_noted += 1

    def lapsed(self, now_ns: int) -> Iterator[tuple[tuple[int, int], BlockId]]:
        """Pop the lapses that are due, with their blocks. A lapse is void if its block has got another one since."""
        while self._lapses and self._lapses[0][0] <= now_ns:
            until_ns, number, block_id = heapq.heappop(self._lapses)
            yield (until_ns, number), block_id

    def _level(self, priority: int) -> OrderedDict[BlockId, None]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
        return level
