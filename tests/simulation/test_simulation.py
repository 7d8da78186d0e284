"""Random schedules in the normal run: twice as many as show every planted bug (test_mutants.py).

EVERBATCH_SCHEDULES says how many; `python -m tests.simulation` searches for as long as wanted. Each of them runs once, for all
tests that look at it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest

from tests.simulation.events import Event
from tests.simulation.reached import Reached
from tests.simulation.shrink import failed_seeds, report
from tests.simulation.simulator import Simulation

NUM_SCHEDULES = int(os.environ.get("EVERBATCH_SCHEDULES", "500"))
CHUNK = 100
NUM_REPEATED = min(CHUNK, NUM_SCHEDULES // 6)  # schedules that run again, to be compared with their first run


class Run(NamedTuple):
    trace_hash: object
    events: list[Event]


class Chunk(NamedTuple):
    """What CHUNK schedules have shown."""

    reached: Reached
    runs: list[Run]  # of the schedules that run again


@pytest.fixture(autouse=True)
def quiet_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Worker failures are planted: their tracebacks would drown everything else."""
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")


@cache
def chunk(first: int) -> Chunk:
    """Run the schedules from `first` on; the test fails at the first one that does."""
    reached, runs = Reached(), []
    for seed in range(first, first + CHUNK):
        simulation = Simulation(seed)
        try:
            reached.run(simulation)
        except Exception:
            found = report(seed)
            assert found is None, f"{found}\nrun it again with: python -m tests.simulation --start {seed} --seeds 1"
            raise  # what counts beside the simulation is wrong
        if seed < NUM_REPEATED:
            runs.append(Run(simulation.trace_hash, simulation.events))
    return Chunk(reached, runs)


def reached_by(num_schedules: int) -> Reached:
    return sum((chunk(first).reached for first in range(0, num_schedules, CHUNK)), Reached())


def rarer_than(least: dict[str, int], seen: Counter[str]) -> dict[str, int]:
    return {name: seen[name] for name, count in least.items() if seen[name] < count}


@pytest.mark.feature("003-05", "003-16", "004-15", "001-27", "000-24", "000-28", "000-32", "000-34", "003-50")
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_every_schedule_answers_as_if_each_request_ran_alone_with_an_infinite_pool(first: int) -> None:
    chunk(first)


@pytest.mark.parametrize("seed", [1134, 1735, 1762, 2123, 3067])
def test_schedules_that_once_failed_run(seed: int) -> None:
    """3067: a context row whose namespace crowds the batch left its tokens to one that had no blocks for them."""
    assert not failed_seeds(range(seed, seed + 1))


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed, first in enumerate(chunk(0).runs):
        second = Simulation(seed)
        second.run()
        assert first.trace_hash == second.trace_hash, f"seed {seed}"
        assert first.events == second.events, f"seed {seed}"


def test_a_plan_that_is_dropped_changes_nothing() -> None:
    """Without a second level: a plan that could admit a sequence begins to load its KV, though it may be dropped."""
    for seed, plain in enumerate(chunk(0).runs):
        dropping = Simulation(seed, drops_plans=True)
        if dropping.setup.config.kv_cache.host_cache_bytes:
            continue
        dropping.run()
        assert plain.trace_hash == dropping.trace_hash, f"seed {seed}"


def test_replaying_the_events_of_a_schedule_gives_the_same_answers() -> None:
    for seed in range(20):
        simulation, replayed = Simulation(seed), Simulation(seed)
        for _ in range(60):
            simulation.apply(simulation.next_event())
        for event in simulation.events:
            replayed.apply(event)
        assert simulation.trace_hash == replayed.trace_hash


def test_the_schedules_reach_what_drafts_can_meet() -> None:
    """Right drafts, wrong ones, both at once, and sequences that end within a run, or are paused with KV of wrong drafts."""
    least = {"right": 500, "wrong": 500, "pauses": 20, "ends within a run": 20}
    assert rarer_than(least, reached_by(200).drafts) == {}


def test_the_schedules_reach_what_requests_for_several_sequences_can_meet() -> None:
    """Beams that go their whole way, are paused, and wait for another width; sequences that find their prompt computed."""
    least = (
        "rows of beams",
        "paused rows of beams",
        "changes of the width",
        "rows of several",
        "paused rows of several",
    )
    assert rarer_than(dict.fromkeys(least, 20), reached_by(300).several) == {}


def test_the_schedules_reach_what_guides_can_meet() -> None:
    """Outputs that a guide ends, that go on after a pause, beams, several sequences, sessions, and all ends of a wait."""
    least = {
        "rows": 500,
        "rows that go on": 5,
        "rows of beams": 50,
        "rows of several": 50,
        "rows of sessions": 50,
        "namespaces": 50,
        "guide": 50,
        "compiling": 20,
        "CANCELLED while its guide is compiled": 20,
        "TIMED_OUT while its guide is compiled": 5,
        "stuck": 1,
    }
    assert rarer_than(least, reached_by(300).guides) == {}


def test_the_schedules_reach_what_a_second_level_can_meet() -> None:
    """Blocks that come back, loads that stall, queues that are full, and blocks that are no longer what they were."""
    least = {
        "writes": 300,
        "writes refused": 20,
        "loads": 60,
        "harms": 60,
        "blocks read back": 50,
        "miss damaged": 8,
        "miss stale": 1,
        "miss stalled": 5,
    }
    assert rarer_than(least, reached_by(300).level) == {}


def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    """A simulator that never evicts proves nothing about eviction."""
    least = (
        "pauses",
        "recomputed tokens",
        "evicted sequences",
        "cached tokens",
        "evicted blocks",
        "reused blocks",
        "copied blocks",
        "blocks swapped in",
        "END_ID ends",
        "STOP_WORDS ends",
        "LENGTH ends",
        "TIMED_OUT ends",
        "CANCELLED ends",
        "ERROR ends",
        "duplicate",
        "field",
        "queue",
        "pool",
        "session 1",
        "session 2",
        "session 3",
        "session 4",
        "session 6",
    )
    assert rarer_than(dict.fromkeys(least, 20), reached_by(200).engine) == {}
