"""KVCommit: the changes that the workers make once a KVPlan has been committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId, SlotId
from backend.kvcache.swap import SwapMap


@dataclass(slots=True)
class TableChange:
    """The change of a sequence's block table in a commit."""

    slot: SlotId
    new_block_ids: list[BlockId]
    is_new: bool  # send the whole table: the sequence is new in its slot, or an entry was replaced


@dataclass(slots=True)
class KVCommit:
    changes: dict[SequenceId, TableChange]
    copies: list[tuple[BlockId, BlockId]]
    swap_out: SwapMap = field(default_factory=list)
    swap_in: SwapMap = field(default_factory=list)
    no_room: list[Sequence] = field(default_factory=list)  # paused sequences whose KV has no room in host memory
