"""EngineLoad counts this stub's requests in the engine, so that the stub can refuse what the engine is sure to refuse.

The engine holds at most one full batch and one full queue. When that many of this stub's own requests are unanswered, the
engine cannot accept another. It would say so after its present step, which takes long with a full batch; this count says so
within microseconds. Requests of other models, and the limit on queued tokens, are not counted here, so the engine itself
refuses on their account.
"""

from __future__ import annotations

import threading

from backend.api import EngineConfig, Overloaded


class EngineLoad:
    """A counter that any thread may use."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_queue_size = config.limits.max_queue_size
        self._capacity = config.scheduler.max_batch_size + config.limits.max_queue_size
        self._num_requests = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise Overloaded when the engine is sure to refuse one more request."""
        if self._num_requests >= self._capacity:
            raise Overloaded(
                f"Exceeds maximum queue size: Maximum queue size of {self._max_queue_size} is reached "
                "(limits.max_queue_size); try again later"
            )

    def enter(self) -> None:
        """Count a request that is about to be sent to the engine."""
        with self._lock:
            self._num_requests += 1

    def leave(self) -> None:
        """Count out a request that has had its final response, or that could not be sent."""
        with self._lock:
            self._num_requests -= 1
