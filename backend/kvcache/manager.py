"""KVCacheManager: the only facade of the cache. Nobody else touches blocks, tables or slots.

Life of a sequence's blocks, with the calls that move it:

    plan.admit + commit   found blocks are locked, new ones allocated, a slot is given
    plan.extend + commit  more blocks for a running sequence; a shared block that would be written is copied first
    advance               blocks that have become full are entered into the trie; those outside the window are let go
    plan.pause + commit   the table is kept, its blocks unlocked: cached, evictable, tail first
    release(keep=True)    the same, for a session between turns
    release(keep=False)   the table is gone; blocks known to the trie stay cached, the rest is free

Who may find whose KV (`KvCacheConfig.sharing`): a namespace's requests find all that the namespace has, per token. Requests
without one find each other's whole blocks, so that nobody can tell a stranger's prompt token by token, and are told only of
what is their own. A session always finds its own KV, per token.

A returning sequence finds out only at `plan.admit` how much of its KV survived (`survivors`): handles whose unique id has
changed are lost. The tokens never are; what is missing is simply computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.api.config import KvCacheConfig
from backend.api.stats import KvCacheStats
from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId, SlotId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.plan import Grant, KVPlan
from backend.kvcache.prefix_trie import PrefixTrie, TrieNode
from backend.kvcache.slots import SlotManager


@dataclass(slots=True)
class Record:
    """The block table of one sequence, and how far the trie knows it."""

    handles: list[BlockHandle] = field(default_factory=list)
    locked: bool = False  # its blocks carry references
    num_dropped: int = 0  # table entries from the front that have left the window
    node: TrieNode | None = None
    depth: int = 0  # blocks entered into the trie


@dataclass(slots=True)
class TableChange:
    """How a sequence's block table differs after a commit."""

    slot: SlotId
    new_block_ids: list[BlockId]
    is_new: bool  # the whole table must be sent: the sequence is new to its slot, or an entry was replaced


@dataclass(slots=True)
class KVCommit:
    changes: dict[SequenceId, TableChange]
    copies: list[tuple[BlockId, BlockId]]


class KVCacheManager:
    def __init__(
        self,
        config: KvCacheConfig,
        num_blocks: int,
        num_slots: int,
        sliding_window: int | None = None,
        max_chunk_tokens: int = 1 << 30,
    ):
        self.block_size = config.block_size
        self.enable_block_reuse = config.enable_block_reuse and config.sharing != "none"
        self._enable_partial_reuse = config.enable_partial_reuse
        self._sharing = config.sharing
        self.watermark_blocks = int(config.watermark * num_blocks)
        self.trie = PrefixTrie(config.block_size)
        self.blocks = BlockManager(num_blocks, config.chunk_blocks, on_evict=self.trie.forget)
        self.slots = SlotManager(num_slots)
        self.records: dict[SequenceId, Record] = {}
        self._window = sliding_window
        self._max_chunk_tokens = max_chunk_tokens
        self._reused_blocks_total = 0
        self._missed_blocks_total = 0

    @property
    def usable_blocks(self) -> int:
        """What one sequence can ever get: the pool less the watermark."""
        return self.blocks.capacity - self.watermark_blocks

    def blocks_for(self, num_cells: int) -> int:
        """Table entries that cover KV positions [0, num_cells)."""
        return -(-num_cells // self.block_size)

    def blocks_needed(self, num_cells: int) -> int:
        """Blocks held at once while KV grows to `num_cells` positions; a sliding window bounds it."""
        whole = self.blocks_for(num_cells)
        if self._window is None:
            return whole
        return min(whole, self.blocks_for(self._window + self._max_chunk_tokens) + 2)

    def cells_at_admission(self, num_tokens: int, computed: int) -> int:
        """KV positions to allocate when a sequence of `num_tokens` known tokens is admitted: all, or a chunk under a window."""
        return num_tokens if self._window is None else min(num_tokens, computed + self._max_chunk_tokens)

    def num_growth_blocks(self, seq: Sequence, max_cells: int) -> int:
        """Blocks that a running sequence may still ask for until its KV holds `max_cells` positions."""
        record = self.records[seq.seq_id]
        return max(0, self.blocks_needed(max_cells) - (len(record.handles) - record.num_dropped))

    def trusts(self, seq: Sequence) -> bool:
        """Whether the sequence may know how much of its prompt others have computed."""
        return self._sharing == "all" or not seq.is_anonymous

    def match(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], BlockHandle | None, int]:
        """KV that the trie knows of the sequence's first `limit` tokens: (whole blocks, a block whose head is right, its tokens)."""
        partial = self._enable_partial_reuse and self.trusts(seq)
        return self.trie.match(seq.namespace, seq.token_ids, limit, partial)

    def plan(self) -> KVPlan:
        """Start a plan on the state as it is. Dropping it changes nothing."""
        return KVPlan(self)

    def survivors(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], int]:
        """What is left of a sequence's own KV: (blocks, tokens they hold right, at most `limit`)."""
        record = self.records.get(seq.seq_id)
        if record is None:
            return [], 0
        num_blocks = self.blocks.verify(record.handles)
        computed = min(seq.num_computed_tokens, num_blocks * self.block_size, limit)
        kept = record.handles[: self.blocks_for(computed)]
        return (kept, computed) if self.window_is_whole(kept, computed) else ([], 0)

    def window_is_whole(self, kept: list[BlockHandle], computed: int) -> bool:
        """Whether the blocks that the token at position `computed` attends to are all there."""
        if self._window is None:
            return True
        num_dropped = sum(handle is DROPPED for handle in kept)
        return num_dropped <= self._num_outside_window(computed)

    def inside_window(self, handles: list[BlockHandle]) -> list[BlockHandle]:
        """A prefix of whole blocks without those that the token behind them no longer attends to."""
        if self._window is None:
            return handles
        outside = self._num_outside_window(len(handles) * self.block_size)
        return [DROPPED] * outside + handles[outside:]

    def commit(self, plan: KVPlan) -> KVCommit:
        """Carry a plan out: pause, lock what was found, allocate (evicting the least recently used), note copies.

        Writes slot and num_computed_tokens of every sequence it admits or pauses.
        """
        if not (plan.grants or plan.pauses):
            return KVCommit({}, [])
        for seq in plan.pauses:
            self._unlock(self.records[seq.seq_id], keep=True)
            self._release_slot(seq)
        grants = list(plan.grants.values())
        for grant in grants:
            if grant.admitted:
                self._lock_found(grant)
        for grant in grants:
            if grant.admitted:
                self._adopt_table(grant)
        copies: list[tuple[BlockId, BlockId]] = []
        changes = {grant.seq.seq_id: self._allocate(grant, copies) for grant in grants}
        for grant in grants:
            if grant.copy_from is not None:
                block_id = grant.copy_from.block_id
                self.blocks.release(block_id, keep=grant.admitted or self.trie.holds(block_id))
        for grant in grants:
            grant.seq.num_writable_cells = self._num_writable_cells(grant.seq)
        return KVCommit(changes, copies)

    def advance(self, seq: Sequence) -> None:
        """Take note that `seq.num_computed_tokens` has grown. Must follow every step that takes it to `seq.kv_due_at`."""
        record = self.records[seq.seq_id]
        full = seq.num_computed_tokens // self.block_size
        if self.enable_block_reuse and full > record.depth:
            self.blocks.mark_shareable(record.handles[record.depth : full])
            record.node, record.depth = self.trie.insert(
                seq.namespace, record.node, record.depth, seq.token_ids, record.handles, full
            )
        if self._window is not None:
            self._drop_outside_window(seq, record)
        seq.kv_due_at = self._next_due(full, record)

    def release(self, seq: Sequence, keep: bool) -> None:
        """The sequence leaves the batch. `keep`: remember its table, for it may return; otherwise forget the sequence."""
        record = self.records.get(seq.seq_id)
        if record is not None:
            if record.locked:
                self._unlock(record, keep)
            elif not keep:
                self._discard(record.handles)
            if not keep:
                del self.records[seq.seq_id]
        self._release_slot(seq)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """An idle sequence is cut to `num_tokens`: let go of the blocks beyond. The caller cuts the token ids."""
        record = self.records.get(seq.seq_id)
        if record is None:
            return
        assert not record.locked, f"{seq!r} is running and cannot be cut"
        first = self.blocks_for(num_tokens)
        self._discard(record.handles[first:])
        del record.handles[first:]
        record.num_dropped = min(record.num_dropped, first)
        record.node, record.depth = None, 0

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all of a running parent's blocks; nothing is allocated. Writing to a shared block copies it."""
        handles = self.records[parent.seq_id].handles
        self.blocks.mark_shareable(handles)
        for handle in handles:
            if handle is not DROPPED:
                self.blocks.lock(handle.block_id)
        source = self.records[parent.seq_id]
        self.records[child.seq_id] = Record(list(handles), True, source.num_dropped, source.node, source.depth)
        child.slot = self.slots.acquire(child.seq_id)
        child.num_computed_tokens = parent.num_computed_tokens
        parent.num_writable_cells = 0

    def block_ids(self, seq: Sequence) -> list[BlockId]:
        """The block table; -1 where the window has let a block go."""
        return [handle.block_id for handle in self.records[seq.seq_id].handles]

    def num_evicted_blocks(self, seq: Sequence) -> int:
        """How many blocks from the first lost one on a sequence that is not running has lost."""
        record = self.records.get(seq.seq_id)
        return 0 if record is None else len(record.handles) - self.blocks.verify(record.handles)

    def resize(self, num_blocks: int) -> None:
        """Change the pool's size; a shrink takes effect as running sequences let go of blocks."""
        self.blocks.resize(num_blocks)

    def lose_everything(self) -> None:
        """Evict every cached block, because the workers' memory can no longer be trusted. Nothing may be running."""
        while self.blocks.num_cached:
            self.blocks.evict_lru()

    def stats(self) -> KvCacheStats:
        blocks = self.blocks
        return KvCacheStats(
            max_num_blocks=blocks.num_blocks,
            free_num_blocks=blocks.num_free,
            cached_num_blocks=blocks.num_cached,
            used_num_blocks=blocks.num_active,
            tokens_per_block=self.block_size,
            allocated_num_blocks=blocks.num_backed,
            alloc_new_blocks_total=blocks.num_allocated_total,
            reused_blocks_total=self._reused_blocks_total,
            missed_blocks_total=self._missed_blocks_total,
            evicted_blocks_total=blocks.num_evicted_total,
        )

    def check_integrity(self, running: Iterable[Sequence] = ()) -> None:
        """Raise AssertionError when blocks, references, trie or slots do not add up."""
        self.blocks.check_integrity()
        self.trie.check_integrity()
        self.slots.check_integrity()
        references: dict[BlockId, int] = {}
        for record in self.records.values():
            for handle in record.handles if record.locked else ():
                if handle is not DROPPED:
                    references[handle.block_id] = references.get(handle.block_id, 0) + 1
        for block in self.blocks.blocks:
            owners = references.get(block.block_id, 0)
            assert block.ref_count == owners, f"block {block.block_id}: ref_count {block.ref_count} != {owners} tables"
        for seq in running:
            covered = len(self.records[seq.seq_id].handles) * self.block_size
            cells = seq.num_computed_tokens + seq.num_inflight_tokens
            assert cells <= covered, f"{seq!r} has {cells} KV cells in {covered}"
            writable = seq.num_writable_cells
            assert writable <= max(cells, self._num_writable_cells(seq)), f"{seq!r} must not write up to {writable}"

    def _lock_found(self, grant: Grant) -> None:
        for handle in (*grant.kept, *([grant.copy_from] if grant.copy_from else [])):
            if handle is not DROPPED:
                self.blocks.lock(handle.block_id)

    def _adopt_table(self, grant: Grant) -> None:
        """Make the found blocks the sequence's table; its own blocks that were not kept have lost their last reader."""
        record = self.records.setdefault(grant.seq.seq_id, Record())
        kept = set(grant.kept)
        stale = [handle for handle in record.handles if handle not in kept]
        record.locked = True
        record.handles = list(grant.kept)
        record.num_dropped = sum(handle is DROPPED for handle in grant.kept)
        record.node, record.depth = None, 0
        self._discard(stale)
        grant.seq.num_computed_tokens = grant.computed
        grant.seq.kv_due_at = 0

    def _allocate(self, grant: Grant, copies: list[tuple[BlockId, BlockId]]) -> TableChange:
        seq = grant.seq
        record = self.records[seq.seq_id]
        new = [self.blocks.allocate().handle for _ in range(grant.num_new)]
        if grant.copy_from is not None:
            copies.append((grant.copy_from.block_id, new[0].block_id))
        if grant.replaces is not None:
            record.handles[grant.replaces] = new[0]
            record.handles.extend(new[1:])
        else:
            record.handles.extend(new)
        if grant.admitted:
            seq.slot = self.slots.acquire(seq.seq_id)
            num_foreign = len(grant.kept) - min(len(grant.kept), self.blocks_for(grant.own))  # it is told of as new
            seq.num_reused_blocks += len(grant.kept) - num_foreign
            seq.num_new_blocks += num_foreign
            self._reused_blocks_total += len(grant.kept)
            self._missed_blocks_total += len(new)
        seq.num_new_blocks += len(new)
        return TableChange(seq.slot, [handle.block_id for handle in new], grant.admitted or grant.replaces is not None)

    def _unlock(self, record: Record, keep: bool) -> None:
        """Tail first, so that the tail is the least recently used: eviction then shortens a prefix instead of beheading it."""
        for handle in reversed(record.handles):
            if handle is not DROPPED:
                self.blocks.release(handle.block_id, keep or self.trie.holds(handle.block_id))
        record.locked = False

    def _release_slot(self, seq: Sequence) -> None:
        if seq.slot is not None:
            self.slots.release(seq.slot)
            seq.slot = None
        seq.num_writable_cells = 0

    def _discard(self, handles: Iterable[BlockHandle]) -> None:
        """Free cached blocks that nobody can ask for any more."""
        for handle in handles:
            if handle is DROPPED or self.trie.holds(handle.block_id):
                continue
            if self.blocks.blocks[handle.block_id].handle == handle:
                self.blocks.discard(handle.block_id)

    def _num_writable_cells(self, seq: Sequence) -> int:
        """Positions up to the first block, from the one that the next token goes to, that is shared or not there yet."""
        handles = self.records[seq.seq_id].handles
        index = (seq.num_computed_tokens + seq.num_inflight_tokens) // self.block_size
        while index < len(handles) and self.blocks.blocks[handles[index].block_id].ref_count == 1:
            index += 1
        return index * self.block_size

    def _next_due(self, num_full: int, record: Record) -> int:
        """Computed tokens at which another block is full, or the first one that is left lies outside the window."""
        due = (num_full + 1) * self.block_size if self.enable_block_reuse else sys.maxsize
        if self._window is not None:
            due = min(due, (record.num_dropped + 1) * self.block_size + self._window - 1)
        return due

    def _num_outside_window(self, position: int) -> int:
        """Blocks that no token from `position` on reads: it attends to (position - window, position]."""
        return max(0, position - self._window + 1) // self.block_size

    def _drop_outside_window(self, seq: Sequence, record: Record) -> None:
        outside = self._num_outside_window(seq.num_computed_tokens)
        for index in range(record.num_dropped, min(outside, len(record.handles))):
            block_id = record.handles[index].block_id
            record.handles[index] = DROPPED
            self.blocks.release(block_id, keep=self.trie.holds(block_id))
            record.num_dropped = index + 1
