"""Lives of a whole server in the normal run; `python -m tests.simulation.server` searches for as long as wanted.

EVERBATCH_SERVER_SCHEDULES says how many. A failure is told with the line that runs its schedule again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.server.shrink import Failure, report
from tests.simulation.server.simulation import ServerSimulation

ROOT = Path(__file__).resolve().parents[3]
NUM_SCHEDULES = int(os.environ.get("EVERBATCH_SERVER_SCHEDULES", "200"))
CHUNK = 50
NUM_REPEATED = 6  # schedules that run again, here and in a process of their own
AGAIN = """
import sys
from tests.simulation.server.simulation import ServerSimulation
for seed in range(int(sys.argv[1])):
    simulation = ServerSimulation(seed)
    simulation.run()
    print(simulation.world.trace)
"""


class Chunk(NamedTuple):
    reached: Counter[str]
    traces: list[int]


@cache
def chunk(first: int) -> Chunk:
    """Run the schedules from `first` on; the test fails at the first one that does."""
    reached: Counter[str] = Counter()
    traces = []
    for seed in range(first, first + CHUNK):
        simulation = ServerSimulation(seed)
        try:
            simulation.run()
        except Exception as error:  # Any exception out of the server is a finding.
            pytest.fail(report(Failure(seed, error)), pytrace=False)
        reached += simulation.world.reached
        traces.append(simulation.world.trace)
    return Chunk(reached, traces)


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_every_request_ends_once_and_says_what_it_must_whatever_fails(first: int) -> None:
    chunk(first)


def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    """A simulation in which nothing ever fails proves nothing about failures."""
    least = {
        **dict.fromkeys(("kill", "terminate", "freeze", "hang", "cut", "stranger", "thread held", "failed step"), 5),
        **dict.fromkeys(("kill ensemble", "kill tensorrt_llm", "drain", "a process that cannot be started"), 2),
        **dict.fromkeys(("kill while requests run", "cut while requests run", "hang while requests run"), 5),
        **dict.fromkeys(("no file for a connection", "part of a write", "short read"), 20),
        **dict.fromkeys(("client left", "sender that fails", "sender that takes long"), 10),
        **dict.fromkeys(("cancelled while all was well", "request of a client that is gone"), 3),
        **dict.fromkeys(("ends whole", "ends UNAVAILABLE", "ends INTERNAL", "ends part", "ends stop"), 20),
        **dict.fromkeys(("ends INVALID_ARGUMENT", "state unavailable", "state draining"), 10),
        "ends CANCELLED": 2,
        "interrupted thread": 2,
        "second turn": 20,
        "poison": 3,
        **{"a block written": 50, "a block read": 20, "a block found again": 10, "a block of a former engine read": 3},
        **{"a damaged block read": 1, "a disk that stalls": 3, "a disk that fails": 3},
    }
    reached: Counter[str] = sum((chunk(first).reached for first in range(0, NUM_SCHEDULES, CHUNK)), Counter())
    assert {name: reached[name] for name, count in least.items() if reached[name] < count} == {}


def test_the_same_seed_gives_the_same_order_of_threads_in_every_process() -> None:
    """Also where texts have other hashes, which no order may depend on."""
    for seed in range(NUM_REPEATED):
        again = ServerSimulation(seed)
        again.run()
        assert again.world.trace == chunk(0).traces[seed], f"seed {seed}"
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-c", AGAIN, str(NUM_REPEATED)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert [int(line) for line in done.stdout.split()] == chunk(0).traces[:NUM_REPEATED]


def test_nothing_real_happens_in_a_simulation() -> None:
    """No real thread is started, and the server's modules have their own again afterwards."""
    from backend.wire import client

    before = threading.active_count()
    ServerSimulation(3).run()
    assert threading.active_count() == before
    assert client.threading is threading
