"""ResultQueue: passes the updates of one request to a waiting thread or coroutine, without polling."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

from compat.llm.errors import ResultTimeout

T = TypeVar("T")


class ResultQueue(Generic[T]):
    """A queue for one waiting thread or coroutine. Any thread may put items."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._coroutines: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            waiting, self._coroutines = self._coroutines, []
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                # The event loop was closed while a coroutine waited in it; that coroutine cannot be woken any more.
                continue

    def get(self, timeout: float | None = None) -> T:
        """Wait for the next item, at most `timeout` seconds. Raises ResultTimeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._items), timeout):
                raise ResultTimeout(_late(timeout))
            return self._items.popleft()

    async def get_async(self, timeout: float | None = None) -> T:
        """Wait for the next item in a coroutine, without blocking its event loop."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            with self._changed:
                if self._items:
                    return self._items.popleft()
                waiting = (loop, loop.create_future())
                self._coroutines.append(waiting)
            left = None if end is None else end - loop.time()
            try:
                await asyncio.wait_for(waiting[1], left)
            except TimeoutError:
                raise ResultTimeout(_late(timeout)) from None
            finally:
                self._leave(waiting)

    def _leave(self, waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        with self._changed:
            if waiting in self._coroutines:
                self._coroutines.remove(waiting)

    def empty(self) -> bool:
        return not self._items


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _late(timeout: float | None) -> str:
    return f"no result within {timeout:g} s; the request goes on, wait again or abort it"
