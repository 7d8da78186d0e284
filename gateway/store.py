"""Responses for previous_response_id, and conversations, within bounds: the least recently used is forgotten first."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

OVERHEAD_BYTES = 1024  # memory of a response besides its items and texts
ITEM_BYTES = 768  # memory of an item besides its texts
Item = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """A response: the items of its input and of its output, what it was a reply to, and its JSON as GET returns it. Without an
    id: items that were put into a conversation, behind those of `parent`.
    """

    id: str
    input: tuple[Item, ...]
    output: tuple[Item, ...]
    parent: Stored | None
    answer: bytes

    def conversation(self) -> list[Item]:
        """All items from the first on, without instructions: these belong to one request only."""
        newest_first: list[Stored] = []
        node: Stored | None = self
        while node is not None:
            newest_first.append(node)
            node = node.parent
        return [item for stored in reversed(newest_first) for item in (*stored.input, *stored.output)]

    def size(self) -> int:
        return OVERHEAD_BYTES + len(self.answer) + _size_of((*self.input, *self.output))


@dataclass(frozen=True, eq=False)
class Conversation:
    """Items under one id. A change is another Conversation of that id, put in its place, which shares the items that stay."""

    id: str
    created: int
    metadata: dict[str, str]
    parent: Stored | None = None  # the items that were added last, and behind them those before

    @property
    def items(self) -> tuple[Item, ...]:
        return _items_up_to(self.parent)

    def with_items(self, added: Iterable[Item]) -> Conversation:
        return replace(self, parent=_added(self.parent, added))

    def size(self) -> int:
        return OVERHEAD_BYTES + len(str(self.metadata))


@dataclass(frozen=True, eq=False)
class Session:
    """The turns of /v1/chat/interactive under a number that a client has chosen. No route of conversations finds it."""

    id: str
    tokens: int = 0  # the number of tokens of all turns, prompts and answers together
    parent: Stored | None = None  # as in a Conversation

    @property
    def items(self) -> tuple[Item, ...]:
        return _items_up_to(self.parent)

    def with_turn(self, added: Iterable[Item], tokens: int) -> Session:
        """`tokens`: of all turns with this one."""
        return Session(self.id, tokens, _added(self.parent, added))

    def size(self) -> int:
        return OVERHEAD_BYTES


def _items_up_to(last: Stored | None) -> tuple[Item, ...]:
    return () if last is None else tuple(last.conversation())


def _added(last: Stored | None, added: Iterable[Item]) -> Stored:
    return Stored("", tuple(added), (), last, b"")


def _size_of(items: Iterable[Item]) -> int:
    return sum(ITEM_BYTES + sum(len(str(value).encode()) for value in item.values()) for item in items)


Kept = Stored | Conversation | Session


class _Shelf:
    """The responses of one namespace. Whatever another one continues counts for as long as it is continued, and once, asked for
    or not.
    """

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[float, Kept]] = OrderedDict()  # least recently used first
        self.bytes = 0
        self._counted: weakref.WeakSet[Kept] = weakref.WeakSet()

    def add(self, stored: Kept, now: float) -> None:
        node: Kept | None = stored
        while node is not None and node not in self._counted:
            self._count(node)
            node = node.parent
        self.responses.pop(stored.id, None)
        self.responses[stored.id] = (now, stored)

    def _count(self, node: Kept) -> None:
        size = node.size()
        self.bytes += size
        self._counted.add(node)
        weakref.finalize(node, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        self.bytes -= size


class ResponseStore:
    """Keeps at most `count` responses and `size` bytes of each namespace, none unused for `ttl_s` seconds."""

    def __init__(self, count: int, size: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._size, self._ttl_s, self._clock = count, size, ttl_s, clock
        self._shelves: dict[str, _Shelf] = {}

    def put(self, namespace: str, stored: Kept) -> None:
        shelf = self._shelves.setdefault(namespace, _Shelf())
        shelf.add(stored, self._clock())
        self._forget_old()
        while len(shelf.responses) > self._count or (shelf.bytes > self._size and shelf.responses):
            shelf.responses.popitem(last=False)

    def get(self, namespace: str, response_id: str) -> Kept | None:
        """The response or conversation with this id, which is now the last one used; None if this namespace has none."""
        self._forget_old()
        shelf = self._shelves.get(namespace)
        if shelf is None or response_id not in shelf.responses:
            return None
        _, stored = shelf.responses.pop(response_id)
        shelf.responses[response_id] = (self._clock(), stored)
        return stored

    def delete(self, namespace: str, response_id: str) -> bool:
        """True if it was there. Responses that continue it keep its turns."""
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
