"""SlotManager: the rows of the persistent batch. The lowest free row is taken first, so that the used rows stay dense."""

from __future__ import annotations

import heapq

from backend.core.step import SequenceId, SlotId


class SlotManager:
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
