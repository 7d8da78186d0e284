"""TextTurns: which request's text is read next, so that no namespace's texts keep the others' waiting.

    short texts   on at most max(2, n) threads, n being triton.text_threads; one namespace on at most half of them
    long texts    on at most half of n threads, at least one; one namespace on at most half of those, at least one

A text of more than LONG_BYTES is long: reading it may take seconds, and however many wait, short ones go on beside them. In
each lane namespaces take turns, and within a namespace the oldest comes first.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from backend.core.round_robin import RoundRobin

LONG_BYTES = 32 << 10  # which a tokenizer reads within about 50 ms
K = TypeVar("K", bound=Hashable)


class TextTurn(NamedTuple, Generic[K]):
    """A text whose reading has begun."""

    lane: _Lane[K]
    namespace: str
    key: K


class _Lane(Generic[K]):
    def __init__(self, num_threads: int) -> None:
        self.num_free = self.num_threads = num_threads
        self.waiting: RoundRobin[K] = RoundRobin(max(1, num_threads // 2))


class TextTurns(Generic[K]):
    """Not thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._short: _Lane[K] = _Lane(max(2, num_threads))
        self._long: _Lane[K] = _Lane(max(1, num_threads // 2))
        self.num_threads = self._short.num_threads + self._long.num_threads  # with which no lane waits for the other

    def put(self, key: K, namespace: str, num_bytes: int) -> None:
        (self._long if num_bytes > LONG_BYTES else self._short).waiting.put(namespace, key)

    def discard(self, key: K) -> None:
        """Remove a text that waits; one that does not wait is ignored."""
        for lane in (self._short, self._long):
            lane.waiting.discard(key)

    def take(self) -> TextTurn[K] | None:
        """The next text to read; call `done` when it has been read. None if none may be read now."""
        for lane in (self._short, self._long):
            if lane.num_free and (taken := lane.waiting.take()) is not None:
                lane.num_free -= 1
                return TextTurn(lane, *taken)
        return None

    def done(self, turn: TextTurn[K]) -> None:
        turn.lane.num_free += 1
        turn.lane.waiting.done(turn.namespace)
