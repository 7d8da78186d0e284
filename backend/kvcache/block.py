"""Block, and the opaque handle by which all other code refers to one.

After LMDeploy TurboMind (SequenceManager/BlockManager): a handle pairs the block with the unique id its content had when the
handle was made. Lost or rewritten content gets another unique id, so that stale handles are detected.
"""

from __future__ import annotations

from typing import NamedTuple

from backend.api.request import DEFAULT_RETENTION_PRIORITY
from backend.core.step import BlockId


class BlockHandle(NamedTuple):
    """Refers to the content of a block, not only to the block."""

    block_id: BlockId
    unique_id: int


DROPPED = BlockHandle(BlockId(-1), 0)  # a table entry whose block the sliding window has released


class Block:
    """A fixed number of KV positions, in all layers.

    free    ref_count 0, unique_id 0    holds nothing
    cached  ref_count 0, unique_id > 0  holds KV of an idle sequence or a shared prefix; evictable
    active  ref_count > 0               used by ref_count running sequences

    `priority`: cached blocks with a lower priority are evicted first. It holds until `lapse` (nanoseconds, and a number that
    distinguishes lapses), None = for ever.
    `is_shareable`: several block tables may refer to it, those of idle sequences included, so it is copied before a write.
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
