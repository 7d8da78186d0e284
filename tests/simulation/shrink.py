"""Makes a failing schedule shorter: leave out events, largest runs first, as long as it still fails in the same way."""

from __future__ import annotations

import logging

from tests.simulation.events import Event
from tests.simulation.simulator import Simulation

MAX_REPLAYS = 2000


def failure_of(seed: int, events: list[Event] | None = None) -> tuple[Exception | None, list[Event]]:
    """Run a seed's own schedule, or `events` on a seed's engine. Returns what went wrong (or None), and the events."""
    simulation = Simulation(seed)
    try:
        if events is None:
            simulation.run()
        else:
            simulation.replay(events)
    except Exception as error:  # any exception out of the engine is a finding
        return error, simulation.events
    return None, simulation.events


def shrink(seed: int, events: list[Event]) -> list[Event]:
    """A sub-list of `events` that still fails with the same class of exception; no event of it can be left out."""
    original, _ = failure_of(seed, events)
    size, replays = max(1, len(events) // 2), 0
    while replays < MAX_REPLAYS:
        start, before = 0, len(events)
        while start < len(events) and replays < MAX_REPLAYS:
            candidate = events[:start] + events[start + size :]
            replays += 1
            if type(failure_of(seed, candidate)[0]) is type(original):
                events = candidate
            else:
                start += size
        if size == 1 and len(events) == before:
            break
        size = max(1, size // 2)
    return events


def report(seed: int) -> str | None:
    """None when the seed passes; else its number, engine, shortest schedule found, and the exception."""
    error, events = failure_of(seed)
    if error is None:
        return None
    shortest = shrink(seed, events)
    final_error, lived = failure_of(seed, shortest)
    setup = Simulation(seed).setup
    lines = [
        f"seed {seed}: {type(error).__name__}: {error}",
        f"engine: {setup.config.kv_cache} {setup.config.scheduler}",
        f"limits: {setup.config.limits.max_queue_size} queued, {setup.config.sessions}",
        f"window {setup.window}, {setup.sink_tokens} sink tokens",
    ]
    lines += [f"  {event}" for event in lived]
    return "\n".join([*lines, f"{type(final_error).__name__}: {final_error}"])


def failed_seeds(seeds: range) -> list[int]:
    """Those of `seeds` that fail. For worker processes: it silences the engine's log of planted failures."""
    logging.getLogger("everbatch.engine").setLevel(logging.CRITICAL)
    return [seed for seed in seeds if failure_of(seed)[0] is not None]


def first_failure(seeds: range) -> int | None:
    """The first of `seeds` that fails."""
    return next((seed for seed in seeds if failure_of(seed)[0] is not None), None)
