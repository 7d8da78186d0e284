"""Checks of a whole KVCacheManager, for tests and simulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from backend.core.sequence import Sequence
from backend.core.step import BlockId

if TYPE_CHECKING:
    from backend.kvcache.manager import KVCacheManager


def check_integrity(kv: KVCacheManager, running: Iterable[Sequence]) -> None:
    """Raise AssertionError if blocks, references, trie, slots and places of swapped KV are inconsistent."""
    state = kv.state
    state.blocks.check_integrity()
    state.trie.check_integrity()
    state.slots.check_integrity()
    state.swap.check_integrity()
    references: dict[BlockId, int] = {}
    for table in state.tables.values():
        for handle in table.held() if table.is_locked else ():
            references[handle.block_id] = references.get(handle.block_id, 0) + 1
    for block in state.blocks.blocks:
        owners = references.get(block.block_id, 0)
        assert block.ref_count == owners, f"block {block.block_id}: ref_count {block.ref_count} != {owners} tables"
    for seq in running:
        covered = len(state.tables[seq.seq_id].handles) * kv.block_size
        cells = seq.num_computed_tokens + seq.num_inflight_tokens
        assert cells <= covered, f"{seq!r} has {cells} KV cells in {covered}"
        assert not state.swap.holds(seq), f"{seq!r} runs and is swapped"
        writable = seq.num_writable_cells
        assert writable <= max(cells, kv.num_writable_cells(seq)), f"{seq!r} must not write up to {writable}"
