"""Callbacks: work of other threads that the engine's thread finishes."""

from __future__ import annotations

import queue
from collections.abc import Callable


class Callbacks:
    """Any thread may call `post`; all else runs on the engine's thread."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None  # called by `post`, on its thread

    def post(self, callback: Callable[[], None]) -> None:
        """Have the engine's thread run it, and wake that thread."""
        self._posted.put(callback)
        self.wake()

    def run(self) -> None:
        """Run all that has been posted."""
        while not self._posted.empty():
            self._posted.get()()
