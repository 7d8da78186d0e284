"""WaitingQueue: sequences that want a slot. The paused are first, then those that never ran, by priority and acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from backend.core.sequence import Sequence, Status


class WaitingQueue:
    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self.num_tokens = 0  # token ids of all waiting sequences, for the queue limit
        self.num_paused = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def head(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    def append(self, seq: Sequence) -> None:
        """A newly accepted request: behind all of its priority or a higher one, and behind the paused."""
        priority, place = seq.request.priority, len(self._queue)
        while place > self.num_paused and self._queue[place - 1].request.priority < priority:
            place -= 1
        self._queue.insert(place, seq)
        self.num_tokens += seq.num_tokens

    def put_back(self, seq: Sequence) -> None:
        """A sequence that has just become PAUSED: first in line. When several are paused, the youngest must be put back first."""
        self._queue.appendleft(seq)
        self.num_tokens += seq.num_tokens
        self.num_paused += 1

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence whose status is still WAITING or PAUSED. Raises ValueError when it does not wait."""
        if self.head is seq:
            self._queue.popleft()
        else:
            self._queue.remove(seq)
        self.num_tokens -= seq.num_tokens
        self.num_paused -= seq.status is Status.PAUSED
