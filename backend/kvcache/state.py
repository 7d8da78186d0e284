"""CacheState: the whole state of the cache. Plans read it; only the KVCacheManager changes it.

Which KV a request may reuse (`KvCacheConfig.sharing`): within a namespace all KV of the namespace, token by token. Requests
without a namespace reuse whole blocks of each other, so that no client can guess the prompt of another one token by token, and
only reuse of their own KV is reported to them. A session always reuses its own KV, token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

from backend.api.config.schema import KvCacheConfig
from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId, SlotId
from backend.kvcache.block import BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.events import KvEventLog
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.geometry import Geometry
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.states import StatePool
from backend.kvcache.swap import SwapSpace
from backend.kvcache.tables import BlockTable

if TYPE_CHECKING:
    from backend.kvcache.manager import KVCacheManager


class CacheState:
    def __init__(
        self,
        config: KvCacheConfig,
        num_blocks: int,
        num_slots: int,
        geometry: Geometry,
        max_events: int = 0,
        swap_blocks: int = 0,
        states: StatePool | None = None,
    ) -> None:
        self.geometry = geometry
        self.states = states
        self.events = KvEventLog(max_events, num_blocks) if max_events else None
        self.trie = PrefixTrie(config.block_size, EvictedPrefixes(num_blocks), self.events)
        self.blocks = BlockManager(num_blocks, config.chunk_blocks, on_evict=self._forget)
        self.slots = SlotManager(num_slots)
        self.swap = SwapSpace(swap_blocks, self.blocks, config.block_size)
        self.tables: dict[SequenceId, BlockTable] = {}
        if states is not None:
            states.bind(self.tables)
        self.watermark_blocks = int(config.watermark * num_blocks)
        self.enable_block_reuse = config.enable_block_reuse and config.sharing != "none"
        self._enable_partial_reuse = config.enable_partial_reuse
        self._sharing = config.sharing

    def _forget(self, block_id: BlockId) -> None:
        self.trie.forget(block_id)
        if self.states is not None:
            self.states.forget(block_id)

    @property
    def usable_blocks(self) -> int:
        """The most blocks that one sequence can get: the pool less the watermark."""
        return self.blocks.num_blocks - self.watermark_blocks

    def may_report_hits(self, seq: Sequence) -> bool:
        """True if reuse of KV that other requests computed may be reported to the client."""
        return self._sharing == "all" or not seq.is_anonymous

    def match(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], BlockHandle | None, int]:
        """Cached KV of the sequence's first `limit` tokens: (whole blocks, a block whose start matches, matching tokens)."""
        if not self.enable_block_reuse:
            return [], None, 0
        return self.trie.match(seq.namespace, seq.token_ids, limit, self._finds_heads(seq))

    def num_lost_tokens(self, seq: Sequence, kept: list[BlockHandle], computed: int) -> tuple[int, int]:
        """Evicted tokens of a sequence that has not run yet: those that follow its `computed` tokens and were cached once.

        Returns (their number, the number that may be reported to the client). `kept`: the whole blocks of the computed tokens.
        """
        if seq.max_computed_tokens or not self.enable_block_reuse:
            return 0, 0  # its own lost KV is counted when it is recomputed
        num_lost = self.trie.num_lost_blocks(seq.namespace, seq.token_ids, seq.max_found_tokens, kept)
        lost = (len(kept) + num_lost) * self.geometry.block_size - computed if num_lost else 0
        return lost, lost if self.may_report_hits(seq) else 0

    def tail(self, seq: Sequence, table: BlockTable) -> BlockHandle | None:
        """The last block of a sequence that leaves the batch, if it is not full and others may reuse it; else None.

        Others may not reuse it if its KV is foreign, if the trie lacks a block in front of it, if another sequence still
        writes to it, or if it is output of a beam search (whose full blocks are not shared either).
        """
        num_full, num_tail_tokens = divmod(seq.num_computed_tokens, self.geometry.block_size)
        is_known = self.enable_block_reuse and table.depth == num_full and not seq.kv_is_foreign
        if not (is_known and num_tail_tokens and self._finds_heads(seq) and seq.beam_width == 1):
            return None
        handle = table.handles[num_full]
        return handle if self.blocks.ref_count(handle.block_id) == 1 else None

    def _finds_heads(self, seq: Sequence) -> bool:
        """True if the sequence may reuse blocks that match only at their start."""
        return self._enable_partial_reuse and self.may_report_hits(seq)

    def survivors(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], int]:
        """The KV of a sequence that has not been evicted: (blocks, tokens in them, at most `limit`)."""
        table = self.tables.get(seq.seq_id)
        if table is None:
            return [], 0
        num_blocks = self.blocks.verify(table.handles)
        computed = min(seq.num_computed_tokens, num_blocks * self.geometry.block_size, limit)
        kept = table.handles[: self.geometry.blocks_for(computed)]
        return (kept, computed) if self.geometry.window_is_whole(kept, computed) else ([], 0)


class SlotManager:
    """The rows of the persistent batch. The lowest free row is taken first, so that the used rows stay dense."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._owner: dict[SlotId, SequenceId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, seq_id: SequenceId) -> SlotId:
        """Take the lowest free slot. Raises IndexError if none is free."""
        slot = SlotId(heapq.heappop(self._free))
        self._owner[slot] = seq_id
        return slot

    def release(self, slot: SlotId) -> None:
        """Return a slot. Raises KeyError if it was not in use."""
        del self._owner[slot]
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        held = len(self._owner)
        assert held + len(self._free) == self.num_slots, (
            f"held {held} + free {len(self._free)} != {self.num_slots} slots"
        )


def check_integrity(kv: KVCacheManager, running: Iterable[Sequence]) -> None:
    """Raise AssertionError if blocks, references, trie, slots and places of swapped KV are inconsistent."""
    state = kv.state
    state.blocks.check_integrity()
    state.trie.check_integrity()
    state.slots.check_integrity()
    state.swap.check_integrity()
    if state.states is not None:
        state.states.check_integrity(block.handle for block in state.blocks.blocks if block.unique_id)
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
