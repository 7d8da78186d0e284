"""KVCacheManager: the only interface of the cache. No other class changes blocks, block tables or slots.

The life of a sequence's blocks, with the calls that change it:

    plan.admit + commit   blocks found in the cache are locked, new ones allocated, a slot is acquired
    plan.extend + commit  a running sequence gets more blocks; a shared block is copied before it is written
    advance               full blocks are inserted into the trie; blocks outside the sliding window are released
    plan.pause + commit   the block table is kept and its blocks are unlocked: cached and evictable, the tail first
    release(keep=True)    the same, for a session between turns
    release(keep=False)   the block table is dropped; blocks in the trie stay cached, also a last one that is not full

Only at `plan.admit` a returning sequence learns how much of its KV survived (`survivors`): handles whose unique id has changed
were evicted. Token ids are never lost, so the missing KV is recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from backend.api.config.schema import KvCacheConfig
from backend.api.stats import BlocksStored, KvCacheStats, KvEvent
from backend.core.sequence import Sequence, Status
from backend.core.step import BlockId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.geometry import Geometry
from backend.kvcache.plan import KVCommit, KVPlan, TableChange
from backend.kvcache.pool_records import PoolRecords
from backend.kvcache.retention import Retention
from backend.kvcache.second_level import SecondLevel
from backend.kvcache.state import CacheState, check_integrity
from backend.kvcache.states import StatePool
from backend.kvcache.tables import BlockTable, Grant, count_dropped


class KVCacheManager:
    def __init__(
        self,
        config: KvCacheConfig,
        num_blocks: int,
        num_slots: int,
        sliding_window: int | None = None,
        max_chunk_tokens: int = 1 << 30,
        max_events: int = 0,
        level: SecondLevel | None = None,
        swap_blocks: int = 0,
        records: PoolRecords | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`sliding_window`: tokens that a token attends to in the layer with the widest window; None: a layer has none.

        `max_events`: how many events are kept until `take_events`; 0 = none are made. `level`: keeps blocks outside of the pool.
        `swap_blocks`: room for blocks of paused sequences in host memory. `records`: of a pool that outlives the engine,
        which may hold KV of the engine before. `states`: of a model with recurrent layers.
        """
        self.geometry = Geometry(config.block_size, sliding_window, max_chunk_tokens, config.sink_tokens)
        self.state = CacheState(config, num_blocks, num_slots, self.geometry, max_events, swap_blocks, states)
        self._blocks, self._trie, self._tables = self.state.blocks, self.state.trie, self.state.tables
        self.states = states
        self._reused_blocks_total = 0
        self._missed_blocks_total = 0
        self._retention = Retention(self._blocks, self._trie, config.block_size)
        self.level = level
        if level is not None:
            level.bind(self._blocks, self._trie, self.geometry)
        self._records = records
        if records is not None:
            records.bind(self._blocks, self._trie)

    @property
    def block_size(self) -> int:
        """KV positions of one block."""
        return self.geometry.block_size

    @property
    def num_backed_blocks(self) -> int:
        """Blocks that have memory; block tables use the ids below this number."""
        return self._blocks.num_backed

    @property
    def num_slots(self) -> int:
        """Rows of the persistent batch."""
        return self.state.slots.num_slots

    @property
    def usable_blocks(self) -> int:
        """The most blocks that one sequence can get: the pool less the watermark."""
        return self.state.usable_blocks

    @property
    def watermark_blocks(self) -> int:
        """Blocks that stay free when a sequence is admitted while others run."""
        return self.state.watermark_blocks

    def blocks_needed(self, num_cells: int) -> int:
        """The most blocks held at once while KV grows to `num_cells` positions."""
        return self.geometry.blocks_needed(num_cells)

    def num_growth_blocks(self, seq: Sequence, max_cells: int) -> int:
        """Blocks that a running sequence may still need until its KV holds `max_cells` positions."""
        return max(0, self.geometry.blocks_needed(max_cells) - self._tables[seq.seq_id].num_held)

    def num_private_blocks(self, seq: Sequence, first: int) -> int:
        """Blocks from table entry `first` on that no other sequence uses."""
        table = self._tables.get(seq.seq_id)
        handles = table.handles[first:] if table is not None and table.is_locked else []
        return sum(handle is not DROPPED and self._blocks.ref_count(handle.block_id) == 1 for handle in handles)

    def num_blocks_held(self, seq: Sequence, entries: int) -> int:
        """The number of blocks that a sequence holds among its first `entries` table entries."""
        table = self._tables.get(seq.seq_id)
        handles = table.handles[:entries] if table is not None and table.is_locked else []
        return len(handles) - count_dropped(handles)

    def plan(self) -> KVPlan:
        """Start a plan on the present state. A plan that is not committed changes nothing."""
        return KVPlan(self.state)

    def commit(self, plan: KVPlan) -> KVCommit:
        """Carry out a plan: pause, lock blocks found in the cache, allocate (evicting as needed), list copies.

        Writes the slot and num_computed_tokens of every sequence that it admits or pauses.
        """
        if not (plan.grants or plan.pauses):
            return KVCommit({}, [])
        commit = KVCommit({}, [])
        if plan.pauses and self.state.swap.num_places and self.geometry.window is None:
            commit.swap_out, commit.no_room = self.state.swap.swap_out(plan.pauses, self._tables)
        for seq in plan.pauses:
            self._retention.retain(seq, self._tables[seq.seq_id].handles)
            self._unlock(self._tables[seq.seq_id], keep=True)
            self._release_slot(seq)
        grants = list(plan.grants.values())
        for grant in grants:
            if grant.admitted:
                self._lock_found(grant)
        for grant in grants:
            if grant.admitted:
                self._take_found_blocks(grant)
        restored: dict[int, BlockHandle] = {}
        commit.changes = {grant.seq.seq_id: self._allocate(grant, commit, restored) for grant in grants}
        for grant in grants:
            if grant.copy_from is not None:
                block_id = grant.copy_from.block_id
                self._blocks.release(block_id, keep=grant.admitted or self._trie.holds(block_id))
        for grant in grants:
            grant.seq.num_writable_cells = self.num_writable_cells(grant.seq)
            if grant.admitted and self.level is not None:
                self.level.note_admission(grant, has_run=grant.seq.status is Status.PAUSED)
        return commit

    def advance(self, seq: Sequence, max_shared_tokens: int = sys.maxsize) -> None:
        """Update the cache after `seq.num_computed_tokens` has grown. Call it when that has reached `seq.kv_due_at`.

        KV beyond `max_shared_tokens` is not inserted into the trie.
        """
        table = self._tables[seq.seq_id]
        full = seq.num_computed_tokens // self.block_size
        known = min(full, max_shared_tokens // self.block_size)
        if self.state.enable_block_reuse and known > table.depth and not seq.kv_is_foreign:
            self._blocks.mark_shareable(table.handles[table.depth : known])
            first = table.depth
            table.node, table.depth = self._trie.insert(
                seq.namespace, table.node, table.depth, seq.token_ids, table.handles, known, seq.kv_origin
            )
            if self.states is not None:
                self.states.settle(table.handles, table.node, first, table.depth)
        if self.geometry.window is not None:
            self._drop_outside_window(seq, table)
        seq.kv_due_at = self._next_due(full, table)

    def share(self, seq: Sequence, waiting_siblings: Iterable[Sequence]) -> None:
        """Give waiting sequences of the same prompt the prompt's blocks of a running one.

        Nothing is allocated or locked for them: each reuses the blocks that are still cached when it is admitted.
        """
        table = self._tables[seq.seq_id]
        num_tokens = min(seq.num_prompt_tokens, seq.num_computed_tokens)
        handles = table.handles[: self.geometry.blocks_for(num_tokens)]
        self._blocks.mark_shareable(handles)
        for sibling in waiting_siblings:
            self._tables[sibling.seq_id] = BlockTable(list(handles), num_dropped=count_dropped(handles))
            sibling.num_computed_tokens = num_tokens

    def adopt(self, seq: Sequence, num_tokens: int) -> list[BlockId]:
        """Allocate blocks for KV of a waiting sequence that the caller writes at once. They are cached, and may be evicted.

        Returns [] if the pool has too few that are not in use, or if layers have a sliding window, whose blocks come and go.
        """
        num_blocks = self.geometry.blocks_for(num_tokens)
        if self.geometry.window is not None or num_blocks + self.watermark_blocks > self._blocks.num_available:
            return []
        handles = [self._blocks.allocate().handle for _ in range(num_blocks)]
        self._tables[seq.seq_id] = BlockTable(handles, is_locked=True)
        self._unlock(self._tables[seq.seq_id], keep=True)
        seq.num_computed_tokens, seq.kv_is_foreign = num_tokens, True
        return [handle.block_id for handle in handles]

    def release(self, seq: Sequence, keep: bool, has_waiting_siblings: bool = False) -> None:
        """The sequence leaves the batch. `keep`: keep its block table, for it may return; otherwise forget the sequence.

        `has_waiting_siblings`: waiting sequences refer to its blocks (`share`), so they stay cached.
        """
        table = self._tables.get(seq.seq_id)
        if table is not None:
            if table.is_locked:
                if not keep and (tail := self.state.tail(seq, table)) is not None:
                    self._blocks.mark_shareable([tail])
                    self._trie.insert_tail(
                        *(seq.namespace, table.node, table.depth, seq.token_ids, table.handles),
                        *(seq.num_computed_tokens, seq.kv_origin),
                    )
                self._retention.retain(seq, table.handles)
                self._unlock(table, keep or has_waiting_siblings)
            elif not (keep or has_waiting_siblings):
                self._discard(table.handles)
            if not keep:
                del self._tables[seq.seq_id]
        if self.level is not None:
            self.level.note_release(seq, rests=keep)
        self.state.swap.forget(seq)
        self._release_slot(seq)

    def tick(self, now_ns: int) -> None:
        """Reset the priorities that lapse until `now_ns`. Durations of retention count from the latest tick."""
        self._retention.tick(now_ns)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Release the blocks of an idle sequence beyond `num_tokens`. The caller truncates the token ids."""
        # Siblings share blocks; truncating one would let it overwrite KV that another still uses.
        assert seq.group is None, f"{seq!r} shares blocks with others of its request and cannot be cut"
        table = self._tables.get(seq.seq_id)
        if table is None:
            return
        assert not table.is_locked, f"{seq!r} is running and cannot be cut"
        self._discard(table.cut(self.geometry.blocks_for(num_tokens)))

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Fork: `child` releases its blocks and shares all of `parent`. A shared block is copied before it is written."""
        self.vacate(child)
        table = self._tables[parent.seq_id]
        self._blocks.mark_shareable(table.handles[-1:])
        for handle in table.held():
            self._blocks.lock(handle.block_id)
        self._tables[child.seq_id] = BlockTable(list(table.handles), True, table.num_dropped, table.node, table.depth)
        child.num_computed_tokens = parent.num_computed_tokens
        child.kv_due_at = parent.kv_due_at
        parent.num_writable_cells = 0
        if self.states is not None:
            self.states.fork(parent, child)

    def vacate(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence, which keeps its slot."""
        self._unlock(self._tables[seq.seq_id], keep=False)
        self._tables[seq.seq_id] = BlockTable(is_locked=True)
        seq.num_writable_cells = 0

    def block_ids(self, seq: Sequence) -> list[BlockId]:
        """The block table, with -1 for blocks that the sliding window has released."""
        return self._tables[seq.seq_id].block_ids()

    def num_evicted_blocks(self, seq: Sequence) -> int:
        """Blocks of a sequence that does not run that cannot be reused: the first evicted one and all behind it."""
        table = self._tables.get(seq.seq_id)
        return 0 if table is None else len(table.handles) - self._blocks.verify(table.handles)

    def lose_everything(self) -> None:
        """Evict every cached block, after a failure that may have damaged the KV. No sequence may be running."""
        while self._blocks.num_cached:
            self._blocks.evict_first()
        self.state.swap.lose_everything()
        if self.level is not None:
            self.level.lose_pool()

    def find_inherited(self, seq: Sequence) -> None:
        """Let a sequence that was just accepted find KV of its tokens that the engine before this one has computed."""
        if self._records is not None:
            self._records.find(seq, self.block_size)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call."""
        return [] if self.state.events is None else self.state.events.take()

    def cached_prefixes(self) -> list[BlocksStored]:
        """All blocks that can be found, parents before their children."""
        return self._trie.cached_prefixes()

    def stats(self) -> KvCacheStats:
        blocks = self._blocks
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
            adopted_blocks_total=0 if self._records is None else self._records.num_adopted,
            dropped_blocks_total=0 if self._records is None else self._records.num_dropped,
        )

    def check_integrity(self, running: Iterable[Sequence] = ()) -> None:
        """Raise AssertionError if the state is inconsistent."""
        check_integrity(self, running)

    def _lock_found(self, grant: Grant) -> None:
        for handle in (*grant.kept, *([grant.copy_from] if grant.copy_from else [])):
            if handle is not DROPPED:
                self._blocks.lock(handle.block_id)

    def _take_found_blocks(self, grant: Grant) -> None:
        """Make the blocks found in the cache the sequence's block table, and discard its own blocks that are not among them."""
        table = self._tables.setdefault(grant.seq.seq_id, BlockTable())
        kept = set(grant.kept)
        stale = [handle for handle in table.handles if handle not in kept]
        table.is_locked = True
        table.handles = list(grant.kept)
        grant.lost, grant.own_lost = self.state.num_lost_tokens(grant.seq, grant.kept, grant.computed)
        table.num_dropped = count_dropped(grant.kept)
        table.node, table.depth = None, 0
        table.num_matched, table.passing = grant.num_matched, None
        self._discard(stale)
        grant.seq.num_computed_tokens = grant.computed
        grant.seq.kv_due_at = 0

    def _allocate(self, grant: Grant, commit: KVCommit, restored: dict[int, BlockHandle]) -> TableChange:
        seq = grant.seq
        table = self._tables[seq.seq_id]
        new = self.state.swap.allocate(grant, commit.swap_in, restored)
        if grant.copy_from is not None:
            commit.copies.append((grant.copy_from.block_id, new[0].block_id))
        if grant.replaces is not None:
            table.handles[grant.replaces] = new[0]
            table.handles.extend(new[1:])
        else:
            table.handles.extend(new)
        if grant.admitted:
            seq.slot = self.state.slots.acquire(seq.seq_id)
            if self.states is not None and grant.computed:
                self.states.restore(grant.kept[-1], seq.slot)
            num_own = min(len(grant.kept), self.geometry.blocks_for(grant.own))
            seq.num_reused_blocks += num_own
            seq.num_new_blocks += len(grant.kept) - num_own  # blocks of other clients are reported as new
            is_own_copy = grant.copy_from is not None and self.geometry.blocks_for(grant.own) > len(grant.kept)
            seq.num_copied_blocks += is_own_copy
            self._reused_blocks_total += len(grant.kept)
            self._missed_blocks_total += len(new)
        seq.num_new_blocks += len(new)
        assert seq.slot is not None  # it runs or has just been admitted
        return TableChange(seq.slot, [handle.block_id for handle in new], grant.admitted or grant.replaces is not None)

    def _unlock(self, table: BlockTable, keep: bool) -> None:
        """Release the tail first, so that it is the least recently used: eviction then shortens a prefix from its end."""
        for handle in reversed(table.handles):
            if handle is not DROPPED:
                self._blocks.release(handle.block_id, keep or self._trie.holds(handle.block_id))
        table.is_locked = False

    def _release_slot(self, seq: Sequence) -> None:
        if seq.slot is not None:
            self.state.slots.release(seq.slot)
            seq.slot = None
        seq.num_writable_cells = 0

    def _discard(self, handles: Iterable[BlockHandle]) -> None:
        """Free cached blocks whose content can no longer be found."""
        for handle in handles:
            if handle is DROPPED or self._trie.holds(handle.block_id):
                continue
            if self._blocks.is_current(handle):
                self._blocks.discard(handle.block_id)

    def num_writable_cells(self, seq: Sequence) -> int:
        """KV positions that can be written without a plan: up to the first block that is shared or not allocated yet."""
        handles = self._tables[seq.seq_id].handles
        index = (seq.num_computed_tokens + seq.num_inflight_tokens) // self.block_size
        while index < len(handles) and self._blocks.ref_count(handles[index].block_id) == 1:
            index += 1
        return index * self.block_size

    def _next_due(self, num_full: int, table: BlockTable) -> int:
        """The number of computed tokens at which a block is full next, or leaves the sliding window."""
        due = (num_full + 1) * self.block_size if self.state.enable_block_reuse else sys.maxsize
        if self.geometry.window is not None:
            due = min(due, self.geometry.gap_grows_at(table.num_dropped))
        return due

    def _drop_outside_window(self, seq: Sequence, table: BlockTable) -> None:
        gap = self.geometry.gap(seq.num_computed_tokens)
        for index in range(gap.start + table.num_dropped, min(gap.stop, len(table.handles))):
            block_id = table.handles[index].block_id
            table.handles[index] = DROPPED
            has_waiting_siblings = seq.group is not None and self._blocks.is_shareable(block_id)
            self._blocks.release(block_id, keep=has_waiting_siblings or self._trie.holds(block_id))
            table.num_dropped += 1
