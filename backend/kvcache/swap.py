"""SwapSpace: KV of paused sequences that lies in host memory (`scheduler.preemption=swap`), after vLLM's and QServe's swapping.

    swap_out   a sequence is paused: each of its blocks that no running sequence uses gets a place, one for all tables of it
    swap_in    it runs again: blocks of the pool that have been evicted come back from their places; KV that is still cached stays
    forget     it has ended, or runs: places without a user are free

A step tells the workers which blocks to move between the pool and host memory (StepInput.swap_out, swap_in). It never does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.tables import BlockTable, Grant

SwapMap = list[tuple[BlockId, int]]  # block of the pool, place in host memory


class SwapSpace:
    def __init__(self, num_places: int, blocks: BlockManager, block_size: int) -> None:
        self.num_places = num_places
        self._blocks, self._block_size = blocks, block_size
        self._free = list(range(num_places - 1, -1, -1))
        self._held: dict[SequenceId, dict[int, int]] = {}  # table index -> place, of each swapped sequence
        self._users: Counter[int] = Counter()  # tables that refer to a place

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, seq: Sequence) -> bool:
        """True if the sequence is swapped."""
        return seq.seq_id in self._held

    def can_swap_out(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def swap_out(
        self, paused: Seq[Sequence], tables: Mapping[SequenceId, BlockTable]
    ) -> tuple[SwapMap, list[Sequence]]:
        """Give places to the KV of sequences that are about to be paused; their blocks must still be locked.

        Returns the map, and the sequences of requests for whose blocks there is no room, which have none of them.
        """
        moved: SwapMap = []
        refused: list[Sequence] = []
        leaving = Counter(handle for seq in paused for handle in tables[seq.seq_id].held())
        places: dict[BlockHandle, int] = {}
        for rows in _by_request(paused):
            wanted = {seq.seq_id: self._indices(seq, tables[seq.seq_id].handles, leaving) for seq in rows}
            fresh = dict.fromkeys(
                tables[seq_id].handles[index]
                for seq_id, indices in wanted.items()
                for index in indices
                if tables[seq_id].handles[index] not in places
            )
            if not self.can_swap_out(len(fresh)):
                refused += rows
                continue
            for handle in fresh:
                places[handle] = self._free.pop()
                moved.append((handle.block_id, places[handle]))
            for seq_id, indices in wanted.items():
                self._held[seq_id] = {index: places[tables[seq_id].handles[index]] for index in indices}
                self._users.update(self._held[seq_id].values())
        return moved, refused

    def missing(self, seq: Sequence, num_kept: int, num_tokens: int) -> list[int] | None:
        """The places of the table entries behind the first `num_kept`, as far as `num_tokens` tokens. None if one has none."""
        held, stop = self._held.get(seq.seq_id, {}), -(-num_tokens // self._block_size)
        places = [held.get(index) for index in range(num_kept, stop)]
        return None if None in places else [place for place in places if place is not None]

    def allocate(self, grant: Grant, swap_in: SwapMap, restored: dict[int, BlockHandle]) -> list[BlockHandle]:
        """Allocate the new blocks of a grant, and add those that come from host memory to `swap_in`.

        `restored`: the block of each place that this commit has swapped in. Full blocks are shared as they were before the pause;
        one that is not full has a copy for each sequence, which will write to it.
        """
        num_full = grant.computed // self._block_size - len(grant.kept)
        new: list[BlockHandle] = []
        for index in range(grant.num_new):
            place = grant.swapped[index] if index < len(grant.swapped) else None
            if place in restored and index < num_full:
                new.append(restored[place])
                self._blocks.lock(new[-1].block_id)
                self._blocks.mark_shareable(new[-1:])
                continue
            new.append(self._blocks.allocate().handle)
            if place is not None:
                swap_in.append((new[-1].block_id, place))
                restored[place] = new[-1]
        if grant.admitted:
            self.forget(grant.seq)
        return new

    def forget(self, seq: Sequence) -> None:
        """The sequence runs again, or has ended."""
        for place in self._held.pop(seq.seq_id, {}).values():
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self._free.append(place)

    def lose_everything(self) -> None:
        """Forget all that is swapped, because a failed step may have damaged it."""
        self._held.clear()
        self._users.clear()
        self._free = list(range(self.num_places - 1, -1, -1))

    def check_integrity(self) -> None:
        users = Counter(place for held in self._held.values() for place in held.values())
        assert users == self._users, f"places have the users {self._users}, counted are {users}"
        places = {*self._free, *users}
        assert len(places) == len(self._free) + len(users) == self.num_places, "places are lost, or used twice"

    def _indices(self, seq: Sequence, handles: Seq[BlockHandle], leaving: Counter[BlockHandle]) -> Collection[int]:
        """Table entries with KV that only paused sequences use. What others run with stays where it is."""
        num_full = -(-seq.num_computed_tokens // self._block_size)
        return [
            index
            for index, handle in enumerate(handles[:num_full])
            if handle is not DROPPED and self._blocks.ref_count(handle.block_id) == leaving[handle]
        ]


def _by_request(paused: Seq[Sequence]) -> list[list[Sequence]]:
    """Sequences in groups that are paused and admitted together."""
    groups: dict[int, list[Sequence]] = {}
    for seq in paused:
        groups.setdefault(id(seq.rows[0]), []).append(seq)
    return list(groups.values())
