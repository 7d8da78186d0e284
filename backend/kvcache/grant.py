"""Grant: what one sequence gets when a KVPlan is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.core.sequence import Sequence
from backend.kvcache.block import BlockHandle
from backend.kvcache.tables import count_dropped


@dataclass(slots=True)
class Grant:
    """The blocks, and perhaps the slot, that one sequence gets in this plan."""

    seq: Sequence
    admitted: bool  # True: it gets a slot, and its table is `kept` + new blocks. False: its table is extended
    num_new: int
    computed: int = 0  # admitted: tokens whose KV was found in the cache
    own: int = 0  # admitted: the part of `computed` that may be reported to the client
    kept: list[BlockHandle] = field(default_factory=list)  # admitted: blocks found in the cache, in table order
    copy_from: BlockHandle | None = None  # source of the first new block's content (copy on write, partial match)
    lost: int = (
        0  # written by commit if admitted: tokens behind `computed` whose KV was cached once and has been evicted
    )
    own_lost: int = 0  # the part of `lost` that may be reported to the client
    swapped: list[int] = field(default_factory=list)  # admitted: places from which the first new blocks are swapped in
    replaces: int | None = None  # extended: index of the table entry that the copy replaces

    @property
    def num_held(self) -> int:
        """Blocks that an admitted sequence holds when the plan is committed."""
        return self.num_new + len(self.kept) - count_dropped(self.kept)
