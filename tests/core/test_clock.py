"""Time is read through a Clock only."""

from __future__ import annotations

from backend.core.clock import ManualClock, SystemClock


def test_a_manual_clock_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock(start_ns=5)
    assert (clock.monotonic_ns(), clock.time_ns()) == (5, 5)
    clock.advance(1.5)
    assert clock.monotonic_ns() == clock.monotonic_ns() == 1_500_000_005


def test_the_system_clock_never_runs_backwards() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_ns() for _ in range(1000)]
    assert readings == sorted(readings)
    assert clock.time_ns() > 1_600_000_000 * 10**9
