"""KVPlan: the changes that a step would make to the cache. Nothing changes until KVCacheManager.commit.

A plan is an overlay over the present state: differences of reference counts (`_delta`) and the number of blocks left
(`available`). The commit decides which block is taken or evicted, in the order in which the grants were made.

    available = free + cached - (cached blocks this plan locks) - (new blocks this plan takes) + (blocks its pauses free)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId, SlotId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.state import CacheState
from backend.kvcache.states import StatePool
from backend.kvcache.swap import SwapMap
from backend.kvcache.tables import Grant, count_dropped


class Admission(enum.Enum):
    """The answer to a sequence that waits for admission (AllocStatus in vLLM and QServe)."""

    NOW = "now"
    LATER = "later"  # fits into the pool, but not beside the sequences that run
    NEVER = "never"  # larger than the pool


@dataclass(slots=True)
class _Found:
    """KV that exists for a sequence: whole blocks, then perhaps a block that matches only at its start."""

    kept: list[BlockHandle]
    partial: BlockHandle | None
    computed: int
    own: int  # the part of `computed` that may be reported to the client
    swapped: list[int] = field(default_factory=list)  # places of the blocks behind `kept`, in host memory
    num_matched: int = 0  # whole blocks that were found, before the state decided how many are of use


class Mark(NamedTuple):
    """A copy of a plan's state."""

    delta: dict[BlockId, int]
    available: int
    free_slots: int
    grants: dict[SequenceId, Grant]


class KVPlan:
    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._geometry = state.geometry
        self._delta: dict[BlockId, int] = {}
        self.available = state.blocks.num_available
        self.free_slots = state.slots.num_free
        self.grants: dict[SequenceId, Grant] = {}  # in the order they were made
        self.pauses: list[Sequence] = []

    def extend(self, seq: Sequence, num_cells: int) -> bool:
        """Plan blocks for KV positions [0, num_cells) of a running sequence.

        Returns False and plans nothing if the blocks are not available.
        """
        geometry = self._geometry
        handles = self._state.tables[seq.seq_id].handles
        num_new = max(0, geometry.blocks_for(num_cells) - len(handles))
        first_cell = seq.num_computed_tokens + seq.num_inflight_tokens
        index = first_cell // geometry.block_size
        source = None
        if first_cell % geometry.block_size and self._ref_count(handles[index].block_id) > 1:
            # A running sequence meets a shared block only in its first step. Later the whole table would have to be sent again
            # with all token ids, while the id of the token in flight is not known yet.
            assert not seq.num_inflight_samples, f"{seq!r} generates into a block that others read"
            source = handles[index]
            num_new += 1
        if num_new > self.available:
            return False
        if num_new:
            self.available -= num_new
            self.grants[seq.seq_id] = Grant(seq, False, num_new, copy_from=source, replaces=index if source else None)
            if source:
                self._delta[source.block_id] = self._delta.get(source.block_id, 0) - 1
        return True

    def widen(self, seq: Sequence, num_cells: int) -> bool:
        """Plan blocks for positions [0, num_cells) of a running sequence, beyond what `extend` has planned.

        Returns False and plans nothing if the blocks are not available.
        """
        grant = self.grants.get(seq.seq_id)
        num_planned = len(self._state.tables[seq.seq_id].handles)
        if grant is not None:
            num_planned += grant.num_new - (grant.replaces is not None)
        num_new = self._geometry.blocks_for(num_cells) - num_planned
        if num_new > self.available:
            return False
        if num_new > 0:
            self.available -= num_new
            if grant is None:
                grant = self.grants[seq.seq_id] = Grant(seq, False, 0)
            grant.num_new += num_new
        return True

    def admit(self, seq: Sequence, needed_cells: int, headroom: int) -> Admission:
        """Plan a slot and blocks for the known tokens, reusing KV of its own that survived, or of a common prefix.

        It is admitted only if blocks for KV positions [0, needed_cells) are available with `headroom` blocks to spare.
        """
        geometry = self._geometry
        if geometry.blocks_needed(needed_cells) > self._state.usable_blocks:
            return Admission.NEVER
        if self.free_slots == 0:
            return Admission.LATER
        found = self._find(seq)
        if not self._fits(found, needed_cells, headroom):
            found = self._without_partial(found)  # without a copy, whose source takes one block more meanwhile
            if not self._fits(found, needed_cells, headroom):
                return Admission.LATER
        num_cells = geometry.cells_at_admission(seq.num_tokens, found.computed)
        num_new = max(0, geometry.blocks_for(num_cells) - len(found.kept))
        self.available -= num_new
        for handle in (*found.kept, *([found.partial] if found.partial else [])):
            self._lock(handle)
        self.free_slots -= 1
        grant = Grant(seq, True, num_new, found.computed, found.own, found.kept, found.partial, swapped=found.swapped)
        grant.num_matched = found.num_matched
        self.grants[seq.seq_id] = grant
        return Admission.NOW

    def reserve_slot(self, seq: Sequence) -> Admission:
        """Plan a slot, without blocks, for a dormant row of a beam search."""
        if self.free_slots == 0:
            return Admission.LATER
        self.free_slots -= 1
        self.grants[seq.seq_id] = Grant(seq, True, 0)
        return Admission.NOW

    def mark(self) -> Mark:
        """The state to which `rollback` returns, for admissions that succeed or fail together."""
        return Mark(dict(self._delta), self.available, self.free_slots, dict(self.grants))

    def rollback(self, mark: Mark) -> None:
        """Undo all admissions since the mark was made."""
        self._delta, self.available, self.free_slots, self.grants = mark

    def retract(self, seq: Sequence) -> None:
        """Undo `extend` for a sequence that will be paused after all. Does nothing if it has no grant."""
        grant = self.grants.pop(seq.seq_id, None)
        if grant is None:
            return
        self.available += grant.num_new
        if grant.copy_from is not None:
            self._delta[grant.copy_from.block_id] += 1

    def pause(self, seq: Sequence) -> None:
        """Plan to pause a running sequence. Blocks that only it used become evictable within this plan."""
        assert seq.seq_id not in self.grants, f"{seq!r} is paused after it was granted blocks"
        for handle in self._state.tables[seq.seq_id].held():
            self._delta[handle.block_id] = self._delta.get(handle.block_id, 0) - 1
            if self._ref_count(handle.block_id) == 0:
                self.available += 1
        self.free_slots += 1
        self.pauses.append(seq)

    def _find(self, seq: Sequence) -> _Found:
        """KV to reuse: what survived of the sequence's own, or was swapped, or what the trie has of its prefix: the longest."""
        state, geometry = self._state, self._geometry
        limit = seq.max_found_tokens
        kept, computed = state.survivors(seq, limit)
        if state.states is not None:
            return self._find_state(seq, state.states, kept[: computed // geometry.block_size])
        own = min(seq.num_computed_tokens, limit)
        if state.swap.holds(seq) and computed < own:
            kept = kept[: computed // geometry.block_size]
            swapped = state.swap.missing(seq, len(kept), own)
            if swapped is not None:
                return _Found(kept, None, own, own, swapped)
        matched, matched_partial, partial_tokens = state.match(seq, limit)
        matched_tokens = len(matched) * geometry.block_size + partial_tokens
        if matched_tokens > computed:
            own = matched_tokens if state.may_report_hits(seq) else computed
            return _Found(geometry.inside_window(matched), matched_partial, matched_tokens, own)
        partial = None
        if computed % geometry.block_size and self._must_not_write(kept[-1].block_id):
            partial = kept.pop()
        return _Found(kept, partial, computed, computed)

    def _find_state(self, seq: Sequence, states: StatePool, kept: list[BlockHandle]) -> _Found:
        """Like `_find` where the model has recurrent layers: the blocks that end with one behind which a state is known.

        kept: its own whole blocks that survived.
        """
        matched, _, _ = self._state.match(seq, seq.max_found_tokens)
        num_own, num_matched = states.num_blocks(kept), states.num_blocks(matched)
        own, size, most = num_own, self._geometry.block_size, max(len(kept), len(matched))
        if num_matched > num_own:
            kept, own = matched, num_matched if self._state.may_report_hits(seq) else num_own
        count = max(num_own, num_matched)
        return _Found(kept[:count], None, count * size, own * size, num_matched=most)

    def _without_partial(self, found: _Found) -> _Found:
        computed = len(found.kept) * self._geometry.block_size
        if not self._geometry.window_is_whole(found.kept, computed):
            return _Found([], None, 0, 0)
        return _Found(found.kept, None, computed, min(computed, found.own))

    def _lock(self, handle: BlockHandle) -> None:
        if handle is DROPPED:
            return
        if self._ref_count(handle.block_id) == 0:
            self.available -= 1
        self._delta[handle.block_id] = self._delta.get(handle.block_id, 0) + 1

    def _must_not_write(self, block_id: BlockId) -> bool:
        return self._ref_count(block_id) > 0 or self._state.blocks.is_shareable(block_id)

    def _fits(self, found: _Found, needed_cells: int, headroom: int) -> bool:
        held = len(found.kept) - count_dropped(found.kept)
        new = max(0, self._geometry.blocks_needed(needed_cells) - held)
        pinned = self._num_idle(found.kept) + (
            1 if found.partial and self._ref_count(found.partial.block_id) == 0 else 0
        )
        return new + pinned + headroom <= self.available

    def _num_idle(self, handles: list[BlockHandle]) -> int:
        return sum(1 for handle in handles if handle is not DROPPED and self._ref_count(handle.block_id) == 0)

    def _ref_count(self, block_id: BlockId) -> int:
        return self._state.blocks.ref_count(block_id) + self._delta.get(block_id, 0)


@dataclass(slots=True)
class TableChange:
    """The change of a sequence's block table in a commit."""

    slot: SlotId
    new_block_ids: list[BlockId]
    is_new: bool  # send the whole table: the sequence is new in its slot, or an entry was replaced


@dataclass(slots=True)
class KVCommit:
    """The changes that the workers make once a KVPlan has been committed."""

    changes: dict[SequenceId, TableChange]
    copies: list[tuple[BlockId, BlockId]]
    swap_out: SwapMap = field(default_factory=list)
    swap_in: SwapMap = field(default_factory=list)
    no_room: list[Sequence] = field(default_factory=list)  # paused sequences whose KV has no room in host memory
