"""The engine reads time only through a Clock, so that a test can drive it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_ns(self) -> int:
        """Nanoseconds that never run backwards; for deadlines and latencies."""
        ...

    def time_ns(self) -> int:
        """Wall clock in nanoseconds since 1970; for time stamps only."""
        ...


class SystemClock:
    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def time_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that stands still until `advance`d; for tests and simulation."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now_ns = start_ns

    def advance(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self._now_ns

    def time_ns(self) -> int:
        return self._now_ns
