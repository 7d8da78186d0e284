"""The hour: work phases with clients of all kinds and kills of the engine, and rests at which the server is measured."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai

from deploy.processes import shared_memory_files
from tests.crashes.served import answers_of, asks
from tests.e2e.conftest import health
from tests.e2e.test_engine_death import engine_pid
from tests.e2e.wire import eventually
from tests.hostile.canary import Canary
from tests.hostile.deaths import explanation
from tests.hostile.target import Target
from tests.soak.clients import Clients, Heard, Pauses
from tests.soak.flatness import Sample, what_grew

KILL_EVERY_S = (125.0, 180.0)  # six deaths within ten minutes would make the supervisor give up
OVERRIDES = ("kv_cache.max_tokens=4096",)  # so few that conversations are evicted
MAX_BUGS = 20
NUM_CLIENTS = {"honest": 8, "leaving": 3, "hostile": 3}


@dataclass
class Result:
    """Of a whole soak."""

    samples: list[Sample] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    num_kills: int = 0
    bugs: list[str] = field(default_factory=list)  # of Triton, each of which has ended a server
    pauses: Pauses = field(default_factory=Pauses)

    def failures(self) -> list[str]:
        """Why the soak failed, in sentences; nothing when it passed."""
        return [*self.heard.problems, *what_grew(self.samples)]


def soak(
    directory: Path,
    seconds: float,
    rest_every_s: float,
    seed: int,
    tell: Callable[[str], None],
    kill_every_s: tuple[float, float] = KILL_EVERY_S,
) -> Result:
    """Run for so long. `tell` is given a line after each rest."""
    target, result, rng = Target(directory, OVERRIDES), Result(), random.Random(seed)
    target.start()
    try:
        canary = Canary(target)
        canary.learn()
        with _client(target) as client:
            right = answers_of(asks(target.server.grpc_url, client))
        began = time.monotonic()
        _rest(target, canary, result, began, tell)
        while (left := began + seconds - time.monotonic()) > 0 and len(result.bugs) < MAX_BUGS:
            with _client(target) as client:
                every = asks(target.server.grpc_url, client)
                work = Clients(target, every, right, result.pauses, result.heard, rng.randrange(1 << 20), NUM_CLIENTS)
                work.start()
                _kill_now_and_then(target, result, rng, min(left, rest_every_s), kill_every_s)
                work.stop()
            _look_after_deaths(target, result, tell)
            _rest(target, canary, result, began, tell)
    finally:
        target.stop()
    return result


def _client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{target.gateway_url}/v1", api_key="none", max_retries=0, timeout=120)


def _look_after_deaths(target: Target, result: Result, tell: Callable[[str], None]) -> None:
    """Processes that ended although the soak has not killed them: it kills the engine, whose helpers end with it.

    Triton 24.10 has bugs of its own under cancelled and malformed requests, which are documented. After one of these
    another server is started.
    """
    ends = [death for death in target.look() if not death.who.startswith(("engine", "other"))]
    for death in ends:
        bug = explanation(death, ())
        if bug is None:
            result.heard.problem(f"{death.who} ended or began without being asked to; status {death.status}")
        else:
            result.bugs.append(bug.name)
            tell(f"tritonserver ended by a bug of its own: {bug.name}; another one is started")
    if not target.server.running():
        target.stop()
        target.start()


def _kill_now_and_then(
    target: Target, result: Result, rng: random.Random, seconds: float, kill_every_s: tuple[float, float]
) -> None:
    """Let the clients work for so long, and kill the engine process meanwhile."""
    until = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < until and target.server.running():
        next_kill = time.monotonic() + rng.uniform(*kill_every_s)
        while time.monotonic() < min(until, next_kill) and target.server.running():
            pause.wait(0.2)
        dead = engine_pid(target.server)
        if dead is None or time.monotonic() >= until or not target.server.running():
            continue
        result.pauses.begin()
        os.kill(dead, signal.SIGKILL)
        result.num_kills += 1
        back = eventually(lambda dead=dead: _is_back(target, dead), 90)
        if not back and target.server.running():
            result.heard.problem(f"the engine was not back 90 s after kill {result.num_kills}")
        time.sleep(1.0)  # The gateway and tritonserver hear of it a moment later.
        result.pauses.end()


def _is_back(target: Target, dead: int) -> bool:
    """Whether another engine process than `dead` serves, or the whole server has ended meanwhile."""
    if not target.server.running():
        return True
    report = health(target.server).get("tensorrt_llm")
    return engine_pid(target.server) not in (None, dead) and report is not None and report.state == "ready"


def _rest(target: Target, canary: Canary, result: Result, began: float, tell: Callable[[str], None]) -> None:
    """All clients are gone: answers are as at the start, nothing is in use; measure."""
    for problem in canary.check():
        result.heard.problem(f"at rest: {problem}")
    for problem in result.heard.news():
        tell(f"problem: {problem}")
    files = [file for file in shared_memory_files(target.server.run_id) if file.exists()]
    sample = {
        **target.memory(),
        **target.descriptors(),
        "shared memory": float(len(files)),
        "log": target.log_bytes() / 1e6,
    }
    result.samples.append(sample)
    shown = ", ".join(
        f"{name} {sample[name]:.0f} MB" for name in ("tritonserver", "engine", "gateway") if name in sample
    )
    tell(
        f"{(time.monotonic() - began) / 60:5.1f} min: {sum(result.heard.counts.values()):,} requests, "
        f"{result.num_kills} kills, {len(result.heard.problems)} problems; {shown}"
    )
