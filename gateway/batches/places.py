"""FairPlaces: how many lines are in flight at once. Namespaces take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class FairPlaces:
    def __init__(self, total: int) -> None:
        self.total = total  # may change while places are taken
        self.taken = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, namespace: str) -> None:
        """Wait for a place; `give_back` frees it."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(place)
        self.fill()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        self.taken -= 1
        self.fill()

    def fill(self) -> None:
        """Give free places to those that wait, one to each namespace in turn."""
        while self._waiting and self.taken < self.total:
            namespace, line = self._waiting.popitem(last=False)
            place = line.popleft()
            if line:
                self._waiting[namespace] = line
            if not place.done():
                self.taken += 1
                place.set_result(None)
