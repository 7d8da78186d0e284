"""Block and the opaque handle by which everyone else names one.

After LMDeploy TurboMind (SequenceManager/BlockManager): a handle pairs the block with the unique id its content had when the
handle was made. Content that is lost or rewritten gets another unique id, so a stale handle can be recognised and never read.
"""

from __future__ import annotations

from typing import NamedTuple

from backend.api.request import DEFAULT_RETENTION_PRIORITY
from backend.core.step import BlockId


class BlockHandle(NamedTuple):
    """Names the content of a block, not just the block."""

    block_id: BlockId
    unique_id: int


DROPPED = BlockHandle(BlockId(-1), 0)  # table entry whose positions have left the sliding window


class Block:
    """A fixed run of KV positions, of all layers.

    free    ref_count 0, unique_id 0    holds nothing
    cached  ref_count 0, unique_id > 0  holds KV that an idle sequence or a shared prefix may want again; evictable
    active  ref_count > 0               held by that many running sequences

    `priority`: cached blocks with a lower one are evicted first. It holds until `lapse`
    (nanoseconds, and a number that tells lapses apart), None = for ever.
    `is_shareable`: several tables may name it, idle ones included, so it is never written to again (it is copied first).
    """

    __slots__ = ("block_id", "is_shareable", "lapse", "priority", "ref_count", "unique_id")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.unique_id = 0
        self.is_shareable = False
        self.priority = DEFAULT_RETENTION_PRIORITY
        self.lapse: tuple[int, int] | None = None

    @property
    def handle(self) -> BlockHandle:
        return BlockHandle(self.block_id, self.unique_id)
