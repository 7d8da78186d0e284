"""SecondLevel: which KV blocks are kept outside of the pool, which are to be, and what can be found there. It does no I/O.

    note_admission, note_release   whole blocks of a second use, or of a session that rests, are due to be written
    take_offloads                  gives those that can be copied now a place, and the caller copies and writes them
    written                        a block can be found from now on; or its place is free again
    find, onboard                  the blocks that go on where the pool's known prefix ends; blocks of the pool to write them to

A block is written once: not while the level has it, or is about to. The least recently used block gives its place to a new one,
except while it is read. The head of a prefix counts as used after its tail, as in the pool, so that a prefix becomes shorter from
its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from backend.core.kept_block import BlockRecord, Found, chain, digest_of
from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.geometry import Geometry
from backend.kvcache.prefix_trie import PrefixTrie, enter_cached
from backend.kvcache.tables import Grant

MAX_DUE = 4096  # blocks that wait to be copied; more are left to their next use


class Offload(NamedTuple):
    """A block of the pool that is to be copied to a place of the level."""

    block_id: BlockId
    place: int
    record: BlockRecord
    key: bytes
    stamp: int


class LevelBlock(NamedTuple):
    """A block that the level has."""

    place: int
    record: BlockRecord
    key: bytes


class SecondLevel:
    def __init__(self, fingerprint: str, num_places: int, min_priority: int) -> None:
        """`min_priority`: blocks with a lower priority in the order of eviction are not written."""
        self._fingerprint = digest_of(fingerprint)
        self.num_places = num_places
        self._min_priority = min_priority
        self._places: OrderedDict[bytes, int] = OrderedDict()  # key -> place; the least recently used first
        self._free = list(range(num_places - 1, -1, -1))
        self._due: OrderedDict[bytes, tuple[BlockHandle, BlockRecord]] = OrderedDict()
        self._writing: dict[bytes, int] = {}  # key -> place, of blocks that are being written
        self._lost: dict[SequenceId, int] = {}  # tokens of running sequences whose KV is found, or was lost once
        self._readers: Counter[int] = Counter()  # place -> how many read it
        self._is_open = False  # True when it is known what an engine before this one has left
        self._next_stamp = 1
        self.num_lost_epochs = 0  # how often the pool's content was lost
        self.num_skipped = 0  # blocks that could not be written: too many waited, or they were evicted first

    def bind(self, blocks: BlockManager, trie: PrefixTrie, geometry: Geometry) -> None:
        """The pool whose blocks it keeps."""
        self._blocks, self._trie, self._geometry = blocks, trie, geometry

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_due(self) -> int:
        """Blocks that wait to be copied."""
        return len(self._due)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def open(self, found: Iterable[Found]) -> None:
        """Take what an engine before this one has left. Until then nothing is written."""
        newest = 0
        used: set[int] = set()
        for place, kept in sorted(found, key=lambda each: each.record.stamp):
            newest = kept.stamp
            if kept.block.fingerprint == self._fingerprint and kept.block.key not in self._places:
                self._places[kept.block.key] = place
                used.add(place)
        self._free = [place for place in self._free if place not in used]
        self._next_stamp, self._is_open = newest + 1, True

    # ---- what is to be written ---------------------------------------------------------------------------------------

    def note_admission(self, grant: Grant, has_run: bool) -> None:
        """A sequence runs from now on. KV that it has found, and that was lost and is computed again, has its second use.

        `has_run`: it was paused, and comes back to KV of its own.
        """
        if not has_run:
            self._note(grant.seq, grant.computed)
            if grant.lost:
                self._lost[grant.seq.seq_id] = grant.computed + grant.lost

    def note_release(self, seq: Sequence, rests: bool) -> None:
        """A sequence has left the batch. `rests`: its session goes on."""
        lost = self._lost.pop(seq.seq_id, 0)
        num_tokens = seq.num_computed_tokens if rests else min(lost, seq.num_computed_tokens)
        if num_tokens:
            self._note(seq, num_tokens)

    def _note(self, seq: Sequence, num_tokens: int) -> None:
        handles = self._trie.match(seq.namespace, seq.token_ids, num_tokens, False)[0]
        records = list(self._chain(seq, len(handles)))
        inside = self._geometry.inside_window(handles)
        for handle, record in zip(reversed(inside), reversed(records)):
            key = record.key
            if key in self._places:
                self._places.move_to_end(key)
            elif handle is not DROPPED and key not in self._writing and key not in self._due:
                if len(self._due) < MAX_DUE:
                    self._due[key] = handle, record
                else:
                    self.num_skipped += 1

    def take_offloads(self, count: int) -> list[Offload]:
        """Give up to `count` blocks that are due a place each. The caller copies them at once, before anything else is done."""
        taken: list[Offload] = []
        while self._is_open and self._due and len(taken) < count:
            key, (handle, record) = self._due.popitem(last=False)
            block = self._blocks.blocks[handle.block_id]
            if not self._blocks.is_current(handle):
                self.num_skipped += 1
            elif block.priority >= self._min_priority:
                place = self._take_place()
                if place is None:
                    self.num_skipped += 1
                    break
                self._writing[key] = place
                taken.append(Offload(handle.block_id, place, record, key, self._next_stamp))
                self._next_stamp += 1
        return taken

    def written(self, key: bytes, is_whole: bool) -> None:
        """A write has ended, or was given up."""
        place = self._writing.pop(key)
        if is_whole:
            self._places[key] = place
        else:
            self._free.append(place)

    # ---- what can be found -------------------------------------------------------------------------------------------

    def find(self, seq: Sequence, start: int) -> list[LevelBlock]:
        """The blocks that hold the sequence's tokens from block `start` on, as far as a request may reuse them."""
        stop = seq.max_found_tokens // self._geometry.block_size
        found: list[LevelBlock] = []
        if start >= stop or not self._places:
            return found
        for record in islice(self._chain(seq, stop), start, None):
            place = self._places.get(record.key)
            if place is None:
                break
            found.append(LevelBlock(place, record, record.key))
        return found

    def begin_read(self, blocks: Iterable[LevelBlock]) -> None:
        """Keep their places until `end_read`, and count them as used, the head last."""
        for each in reversed(list(blocks)):
            self._readers[each.place] += 1
            self._places.move_to_end(each.key)

    def end_read(self, blocks: Iterable[LevelBlock]) -> None:
        for each in blocks:
            self._readers[each.place] -= 1
            if not self._readers[each.place]:
                del self._readers[each.place]

    def forget(self, block: LevelBlock) -> None:
        """The block has been found to be no use."""
        if self._places.get(block.key) == block.place:
            del self._places[block.key]
            self._free.append(block.place)

    def onboard(self, seq: Sequence, start: int, count: int) -> tuple[int, list[BlockId]]:
        """Allocate blocks of the pool for `count` blocks of the sequence's tokens from block `start` on. The caller writes all of
        them at once. They can be found, and are cached: an admission that comes too late finds them evicted.

        Returns the number of the first of them, and their ids: none if the pool has no room, or no longer what is before them.
        """
        size = self._geometry.block_size
        matched = self._trie.match(seq.namespace, seq.token_ids, (start + count) * size, False)[0]
        first = len(matched)
        if first < start or first == start + count or not self._blocks.num_available:
            return first, []
        for handle in matched:
            self._blocks.lock(handle.block_id)
        num_new = min(start + count - first, self._blocks.num_available)
        new = [self._blocks.allocate().handle for _ in range(num_new)]
        enter_cached(self._blocks, self._trie, seq, matched, new)
        return first, [handle.block_id for handle in new]

    def lose_pool(self) -> None:
        """The content of the pool is lost: nothing that was copied lately may be written."""
        self.num_lost_epochs += 1

    def check_integrity(self) -> None:
        places = [*self._free, *self._places.values(), *self._writing.values()]
        assert sorted(places) == list(range(self.num_places)), f"places {sorted(places)} of {self.num_places}"
        assert not self._writing.keys() & self._places.keys(), "a block is written twice"
        assert len(self._due) <= MAX_DUE, f"{len(self._due)} blocks are due"

    def _take_place(self) -> int | None:
        """Take a free place, or that of the least recently used block without readers. None if there is none."""
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index] not in self._readers:
                return self._free.pop(index)
        key = next((key for key, place in self._places.items() if place not in self._readers), None)
        return None if key is None else self._places.pop(key)

    def _chain(self, seq: Sequence, num_blocks: int) -> Iterable[BlockRecord]:
        return chain(self._fingerprint, seq.namespace, seq.token_ids, self._geometry.block_size, num_blocks)
