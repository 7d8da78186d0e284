"""The turns behind previous_response_id, within bounds: the least recently used response is forgotten first."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OVERHEAD_BYTES = 1024  # of a response besides its texts
Turn = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """A response: the turns it added, what it was a reply to, and its JSON as GET returns it."""

    id: str
    turns: tuple[Turn, ...]
    parent: Stored | None
    answer: bytes

    def conversation(self) -> list[Turn]:
        """All turns from the first on, without instructions: these belong to one request only."""
        newest_first: list[Stored] = []
        node: Stored | None = self
        while node is not None:
            newest_first.append(node)
            node = node.parent
        return [turn for stored in reversed(newest_first) for turn in stored.turns]

    def size(self) -> int:
        texts = sum(len(str(value).encode()) for turn in self.turns for value in turn.values())
        return OVERHEAD_BYTES + len(self.answer) + texts


class _Shelf:
    """The responses of one namespace. A response counts as long as another one continues it, asked for or not."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[float, Stored]] = OrderedDict()  # least recently used first
        self.bytes = 0

    def add(self, stored: Stored, now: float) -> None:
        size = stored.size()
        self.bytes += size
        weakref.finalize(stored, self._gone, size).atexit = False
        self.responses[stored.id] = (now, stored)

    def _gone(self, size: int) -> None:
        self.bytes -= size


class ResponseStore:
    """Of each namespace at most `count` responses and `size` bytes, none unused for `ttl_s` seconds."""

    def __init__(self, count: int, size: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._size, self._ttl_s, self._clock = count, size, ttl_s, clock
        self._shelves: dict[str, _Shelf] = {}

    def put(self, namespace: str, stored: Stored) -> None:
        shelf = self._shelves.setdefault(namespace, _Shelf())
        shelf.add(stored, self._clock())
        self._forget_old()
        while len(shelf.responses) > self._count or (shelf.bytes > self._size and shelf.responses):
            shelf.responses.popitem(last=False)

    def get(self, namespace: str, response_id: str) -> Stored | None:
        """The response, which is now the last one used; None when it is not there, or another namespace's."""
        self._forget_old()
        shelf = self._shelves.get(namespace)
        if shelf is None or response_id not in shelf.responses:
            return None
        _, stored = shelf.responses.pop(response_id)
        shelf.responses[response_id] = (self._clock(), stored)
        return stored

    def delete(self, namespace: str, response_id: str) -> bool:
        """Whether it was there. Responses that continue it keep its turns."""
        self._forget_old()
        shelf = self._shelves.get(namespace)
        return shelf is not None and shelf.responses.pop(response_id, None) is not None

    def held(self) -> tuple[int, int]:
        """Responses and bytes, of all namespaces."""
        shelves = self._shelves.values()
        return sum(len(shelf.responses) for shelf in shelves), sum(shelf.bytes for shelf in shelves)

    def _forget_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        for shelf in self._shelves.values():
            while shelf.responses and next(iter(shelf.responses.values()))[0] < oldest:
                shelf.responses.popitem(last=False)
