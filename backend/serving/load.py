"""EngineLoad: how many requests of this stub are in the engine, so that what the engine must refuse is refused here.

The engine accepts at most a batch and a full queue; when so many of this stub's own requests are unanswered, the next one
cannot be accepted. To learn that from the engine takes a step of a full batch; here it takes microseconds. Requests of other
models of the same engine, and the limit on queued tokens, are not counted here: then the engine itself refuses.
"""

from __future__ import annotations

import threading

from backend.api import EngineConfig, Overloaded


class EngineLoad:
    """Any thread."""

    def __init__(self, config: EngineConfig):
        self._max_queue_size = config.limits.max_queue_size
        self._capacity = config.scheduler.max_batch_size + config.limits.max_queue_size
        self._num_requests = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises Overloaded when the engine is sure to refuse one more."""
        if self._num_requests >= self._capacity:
            raise Overloaded(
                f"Exceeds maximum queue size: Maximum queue size of {self._max_queue_size} is reached "
                "(limits.max_queue_size); try again later"
            )

    def enter(self) -> None:
        """A request is about to be sent to the engine."""
        with self._lock:
            self._num_requests += 1

    def leave(self) -> None:
        """It has been answered for good, or was not sent after all."""
        with self._lock:
            self._num_requests -= 1
