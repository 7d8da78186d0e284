"""EvictionOrder: which cached block is given up next. The lowest priority first, within one the least recently used.

After TensorRT-LLM's prioritised LRU: a block has the priority that the request that used it last gave it (`RetentionConfig`),
until that lapses.
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
    """A block's priority, and until when it holds (nanoseconds; None = for ever)."""

    priority: int
    until_ns: int | None

    def before(self, own: Retained) -> Retained:
        """What holds for the block ahead of this one, which itself asks for `own`: never less than for this one."""
        if own.priority < self.priority:
            return self
        if self.priority <= DEFAULT_RETENTION_PRIORITY:
            return own
        ends = (own.until_ns, self.until_ns)
        return Retained(own.priority, None if None in ends else max(end for end in ends if end is not None))


class EvictionOrder:
    """The cached blocks. A level of the order exists while blocks have its priority."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[BlockId, None]] = {DEFAULT_RETENTION_PRIORITY: OrderedDict()}
        self._lapses: list[tuple[int, int, BlockId]] = []  # heap: nanoseconds, number, block
        self._num_noted = 0
        self._default = self._levels[DEFAULT_RETENTION_PRIORITY]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BlockId]:
        """In the order of eviction."""
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    def __contains__(self, block: Block) -> bool:
        return block.block_id in self._levels.get(block.priority, ())

    def add(self, block: Block) -> None:
        """A block is cached from now on, as the most recently used of its priority."""
        self._level(block.priority)[block.block_id] = None
        self._size += 1

    def remove(self, block: Block) -> None:
        level = self._levels[block.priority]
        del level[block.block_id]
        self._size -= 1
        if not level and level is not self._default:
            del self._levels[block.priority]

    def first(self) -> BlockId | None:
        """The block to be given up next; None when there is none."""
        if not self._size:
            return None
        level = self._default if len(self._levels) == 1 else self._levels[min(p for p, b in self._levels.items() if b)]
        return next(iter(level))

    def note_lapse(self, block: Block, until_ns: int) -> None:
        """The block's priority holds until then. Of those that lapse at once, who was noted first lapses first."""
        block.lapse = (until_ns, self._num_noted)
        heapq.heappush(self._lapses, (until_ns, self._num_noted, block.block_id))
        self._num_noted += 1

    def lapsed(self, now_ns: int) -> Iterator[tuple[tuple[int, int], BlockId]]:
        """What was noted to end by now, and of which block. It is void when the block has another lapse since."""
        while self._lapses and self._lapses[0][0] <= now_ns:
            until_ns, number, block_id = heapq.heappop(self._lapses)
            yield (until_ns, number), block_id

    def _level(self, priority: int) -> OrderedDict[BlockId, None]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
        return level
