"""StatePool: snapshots of the states of recurrent layers, each behind a whole block of tokens.

The state of a sequence that runs has the number of its slot, and every step overwrites it. It cannot be computed back, so a
sequence that returns, or that shares a prefix, begins with a snapshot: a copy of what the state was behind one of its blocks.
Without one it begins with its first token. A snapshot belongs to the content of its block (BlockHandle) and is lost with it.

    tokens       0 ............ 32 ............ 64 ............ 96 ..... 110        block size 32, prompt of 75 tokens
    blocks       [      b0      |      b1       |      b2       |  b3  ]
    snapshots                                   s0              s1
                 s0  `lasting`: behind the last whole block of the prompt; of every `interval` tokens; where prompts part
                 s1  `passing`: behind the newest whole block; the next one takes its place

Snapshots are evicted by LRU of their own, whether or not their blocks are in use, because losing one costs time and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.api.stats import SnapshotStats
from backend.core.sequence import Sequence
from backend.core.step import BlockId, SequenceId, SlotId
from backend.kvcache.block import BlockHandle
from backend.kvcache.prefix_trie import TrieNode
from backend.kvcache.tables import BlockTable


class Snapshot:
    """A copy of a state. `handle`: the block that it is behind; None: it has been lost."""

    __slots__ = ("handle", "is_passing", "number")

    def __init__(self, number: int, handle: BlockHandle, is_passing: bool) -> None:
        self.number = number
        self.handle: BlockHandle | None = handle
        self.is_passing = is_passing


class StatePool:
    def __init__(self, num_slots: int, num_snapshots: int, block_size: int, interval: int = 0) -> None:
        """`interval`: tokens of a prompt between two snapshots, a multiple of the block size; 0 = its end alone has one.

        The states of the slots have the numbers below `num_slots`.
        """
        self.num_snapshots, self.interval = num_snapshots, interval
        self._block_size = block_size
        self._free = list(range(num_slots + num_snapshots - 1, num_slots - 1, -1))
        self._used: OrderedDict[int, Snapshot] = OrderedDict()  # by number, the least recently used first
        self._of_blocks: dict[BlockId, Snapshot] = {}
        self._copies: list[tuple[int, int]] = []  # due with the next step
        self._saved: set[int] = set()  # numbers that the next step writes: no other row of it may
        self._tables: dict[SequenceId, BlockTable] = {}
        self.num_saved_total = 0
        self.num_evicted_total = 0
        self.num_restored_total = 0

    def bind(self, tables: dict[SequenceId, BlockTable]) -> None:
        """`tables`: of all sequences."""
        self._tables = tables

    @property
    def num_used(self) -> int:
        return len(self._used)

    def num_blocks(self, handles: Seq[BlockHandle]) -> int:
        """How many of these blocks, from the first on, end with the last one that a snapshot is behind."""
        for index in range(len(handles), 0, -1):
            if self._find(handles[index - 1]) is not None:
                return index
        return 0

    def restore(self, handle: BlockHandle, slot: SlotId) -> None:
        """Let the sequence that takes a slot begin behind this block, which has a snapshot."""
        snapshot = self._find(handle)
        assert snapshot is not None, f"no state is known behind block {handle.block_id}"
        self._used.move_to_end(snapshot.number)
        snapshot.is_passing = False
        self._copies.append((snapshot.number, slot))
        self.num_restored_total += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence that runs go on with the state of another one."""
        assert parent.slot is not None and child.slot is not None
        self._copies.append((parent.slot, child.slot))

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies since the last call, for the step whose rows have been asked about."""
        copies, self._copies = self._copies, []
        self._saved.clear()
        return copies

    def saves(self, seq: Sequence, start: int, num_tokens: int) -> list[tuple[int, int]]:
        """The states that a step keeps of a row that runs known tokens from `start` on: (tokens of the sequence, snapshot)."""
        size, end, table = self._block_size, start + num_tokens, self._tables[seq.seq_id]
        if not self.num_snapshots or end // size == start // size:
            return []
        newest, lasting = end // size, {(seq.num_prompt_tokens - 1) // size, table.num_matched}
        of_interval = self.interval // size
        kept, snapshot = [], None
        for whole in range(start // size + 1, newest + 1):
            is_lasting = whole in lasting or (of_interval > 0 and whole % of_interval == 0)
            if is_lasting or whole == newest:
                snapshot = self._save(table.handles[whole - 1], is_passing=not is_lasting)
                if snapshot is not None:
                    kept.append((whole * size, snapshot.number))
        if (passing := table.passing) is not None and passing.is_passing:
            self._lose(passing)
        table.passing = snapshot
        return kept

    def settle(self, handles: Seq[BlockHandle], node: TrieNode | None, first: int, end: int) -> None:
        """Move the snapshots of table entries first .. end - 1 to the trie's blocks of the same tokens, where those are others.

        node: the trie's node of the last entry.
        """
        for index in range(end - 1, first - 1, -1):
            if node is None or node.parent is None:
                return
            if node.handle != handles[index] and (snapshot := self._find(handles[index])) is not None:
                if self._find(node.handle) is not None:
                    self._lose(snapshot)
                else:
                    del self._of_blocks[handles[index].block_id]
                    snapshot.handle = node.handle
                    self._of_blocks[node.handle.block_id] = snapshot
            node = node.parent

    def forget(self, block_id: BlockId) -> None:
        """The content of a block is lost, or about to be. Unknown blocks are ignored."""
        snapshot = self._of_blocks.get(block_id)
        if snapshot is not None:
            self._lose(snapshot)

    def stats(self) -> SnapshotStats:
        return SnapshotStats(
            max_num_snapshots=self.num_snapshots,
            used_num_snapshots=self.num_used,
            saved_snapshots_total=self.num_saved_total,
            restored_snapshots_total=self.num_restored_total,
            evicted_snapshots_total=self.num_evicted_total,
        )

    def check_integrity(self, handles: Iterable[BlockHandle]) -> None:
        """Raise AssertionError if the books are inconsistent. handles: of all blocks that hold something."""
        held = len(self._used)
        assert held + len(self._free) == self.num_snapshots, (
            f"used {held} + free {len(self._free)} != {self.num_snapshots} snapshots"
        )
        assert held == len(self._of_blocks), f"{held} snapshots are used, {len(self._of_blocks)} belong to a block"
        current = set(handles)
        for block_id, snapshot in self._of_blocks.items():
            assert self._used.get(snapshot.number) is snapshot, (
                f"snapshot {snapshot.number} is used and not in the order"
            )
            assert snapshot.handle in current and snapshot.handle.block_id == block_id, (
                f"snapshot {snapshot.number} is behind {snapshot.handle}, which is lost"
            )

    def _find(self, handle: BlockHandle) -> Snapshot | None:
        snapshot = self._of_blocks.get(handle.block_id)
        return snapshot if snapshot is not None and snapshot.handle == handle else None

    def _save(self, handle: BlockHandle, is_passing: bool) -> Snapshot | None:
        """None where the step writes all snapshots already."""
        self.forget(handle.block_id)
        if not self._free:
            oldest = next((each for each in self._used.values() if each.number not in self._saved), None)
            if oldest is None:
                return None
            self._lose(oldest)
            self.num_evicted_total += 1
        snapshot = Snapshot(self._free.pop(), handle, is_passing)
        self._saved.add(snapshot.number)
        self._used[snapshot.number] = self._of_blocks[handle.block_id] = snapshot
        self.num_saved_total += 1
        return snapshot

    def _lose(self, snapshot: Snapshot) -> None:
        if snapshot.handle is not None:
            del self._of_blocks[snapshot.handle.block_id], self._used[snapshot.number]
            self._free.append(snapshot.number)
            snapshot.handle = None
