"""StatisticsHistory: keeps the records of steps until the program fetches them. The oldest go first when there are too many."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from datetime import timedelta
from typing import TypeVar

from backend.api.config.schema import RecordsConfig
from backend.api.stats import DebugTensors, IterationRequests, IterationStats, KvEvent, Records

T = TypeVar("T")


class StatisticsHistory:
    """Any thread may call its methods."""

    def __init__(self) -> None:
        self._iterations: deque[IterationStats] = deque(maxlen=0)
        self._requests: deque[IterationRequests] = deque(maxlen=0)
        self._kv_events: deque[KvEvent] = deque(maxlen=0)
        self._debug_tensors: deque[DebugTensors] = deque(maxlen=0)
        self._changed = threading.Condition()
        self._closed = False

    def limit(self, config: RecordsConfig) -> None:
        """Keep so many records of each kind; what is there stays as far as there is room."""
        with self._changed:
            self._iterations = deque(self._iterations, config.max_iterations)
            self._requests = deque(self._requests, config.max_request_iterations)
            self._kv_events = deque(self._kv_events, config.max_kv_events)
            self._debug_tensors = deque(self._debug_tensors, config.max_debug_iterations)

    def put(self, records: Records) -> None:
        with self._changed:
            self._iterations.extend(records.iterations)
            self._requests.extend(records.requests)
            self._kv_events.extend(records.kv_events)
            self._debug_tensors.extend(records.debug_tensors)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters. Later calls do not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take_iterations(self) -> list[IterationStats]:
        with self._changed:
            return _drained(self._iterations)

    def take_requests(self) -> list[IterationRequests]:
        with self._changed:
            return _drained(self._requests)

    def take_debug_tensors(self) -> list[DebugTensors]:
        with self._changed:
            return _drained(self._debug_tensors)

    def take_kv_events(self, timeout_s: float | None) -> list[KvEvent]:
        """Wait for an event, and return all that are there; [] after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._kv_events), timeout_s)
            return _drained(self._kv_events)


class RecordReader:
    """The part of an Executor that hands out records."""

    _records: StatisticsHistory

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineUnavailable after `shutdown`."""

    def take_iteration_stats(self) -> list[IterationStats]:
        """Statistics of the steps since the last call, oldest first; at most `records.max_iterations` (0 = none are kept)."""
        self._check_open()
        return self._records.take_iterations()

    def take_request_stats(self) -> list[IterationRequests]:
        """The requests in each step since the last call; at most `records.max_request_iterations` steps (0 = none)."""
        self._check_open()
        return self._records.take_requests()

    def take_debug_tensors(self) -> list[DebugTensors]:
        """The `records.debug_tensors` of the steps since the last call; at most `records.max_debug_iterations` (0 = none)."""
        self._check_open()
        return self._records.take_debug_tensors()

    def take_kv_events(self, timeout: timedelta | float | None = 0.0) -> list[KvEvent]:
        """Which blocks can be found in the cache, or no longer, since the last call; at most `records.max_kv_events` (0 = none).

        Waits for the first one, at most for `timeout` (seconds or timedelta; None waits until `shutdown`).
        """
        self._check_open()
        return self._records.take_kv_events(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)


def _drained(shelf: deque[T]) -> list[T]:
    records = list(shelf)
    shelf.clear()
    return records
