"""Carries a plan out: starts the servers of a phase, lets every cell alternate between them, collects the figures.

There are two phases, because they differ in the KV that the servers get: requests that have nothing to do with each other, and
conversations. In a phase all servers run at the same time; those that bear it are stopped (SIGSTOP) while another is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from benchmarks.harness.answers import Answer
from benchmarks.harness.measure import Outcome, alternate
from benchmarks.harness.work import Ask, kv_tokens_for
from benchmarks.peers.environments import BENCH
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import Model
from benchmarks.served import contestants, drive_python
from benchmarks.served.contestants import Setup
from benchmarks.served.options import OURS, Plan
from benchmarks.served.servers import Server, Start
from benchmarks.served.wire import first_model
from deploy.progress import SteppedProgress


class Drive(Protocol):
    """Sends the requests of a cell. Raises DriverFailed."""

    def __call__(self, start: Start, wire: str, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]: ...


@dataclass(frozen=True)
class Drivers:
    """`openai`: of OpenAI's wire, with its name; Triton's wires have the driver in Python."""

    openai: Drive = drive_python.run
    openai_name: str = drive_python.NAME


@dataclass(frozen=True)
class ServerLane:
    """A server by one of its wires."""

    server: Server
    wire: str
    drivers: Drivers = Drivers()

    @property
    def name(self) -> str:
        """`everbatch`, or with a Triton wire `everbatch-grpc`."""
        name = self.server.start.name
        return name if self.wire == "openai" else f"{name}-{self.wire}"

    @property
    def driver(self) -> str:
        """The name of what sends its requests."""
        return self.drivers.openai_name if self.wire == "openai" else drive_python.NAME

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The server runs within."""
        self.server.resume()
        try:
            yield
        finally:
            self.server.pause()

    def warm(self, asks: Sequence[Ask], users: int, seconds: float) -> None:
        """By the driver in Python, whichever driver measures."""
        drive_python.run(self.server.start, self.wire, asks, users, seconds)

    def send(self, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
        """By the driver of the wire. Raises DriverFailed."""
        drive = self.drivers.openai if self.wire == "openai" else drive_python.run
        return drive(self.server.start, self.wire, asks, users, seconds)


def measure(plan: Plan, model: Model, drivers: Drivers, outcome: Outcome, progress: SteppedProgress) -> None:
    """Fill the outcome; an interruption leaves what was measured until then. Raises Skipped when this server does not start."""
    for cells in (plan.single, plan.turns):
        if not cells:
            continue
        with ExitStack() as stack:
            kv_directory = stack.enter_context(TemporaryDirectory(prefix="second-level-", dir=BENCH))
            setup = Setup(
                model,
                kv_tokens=kv_tokens_for(cells),
                users=max(cell.users for cell in cells),
                longest=max(cell.longest for cell in cells),
                scratch=BENCH,
                progress=progress,
                second_level=plan.second_level,
                kv_directory=Path(kv_directory),
            )
            lanes = lanes_of(started(plan, setup, outcome, stack), plan.wires, drivers)
            alternate(cells, lanes, plan.effort, model.vocab_size, outcome, progress)


def lanes_of(servers: Sequence[Server], wires: Sequence[str], drivers: Drivers) -> list[ServerLane]:
    """Every server by OpenAI's wire, and this one by its others."""
    named = [server for server in servers if "openai" in wires or server.start.name != OURS]
    own = [server for server in servers if server.start.name == OURS]
    lanes = [ServerLane(server, "openai", drivers) for server in named]
    return [*lanes, *(ServerLane(server, wire, drivers) for server in own for wire in wires if wire != "openai")]


def started(plan: Plan, setup: Setup, outcome: Outcome, stack: ExitStack) -> list[Server]:
    """The servers that are ready, stopped as far as they bear it. Raises Skipped when this one does not start."""
    makers: dict[str, Callable[[], Start]] = {OURS: partial(contestants.ours, setup)}
    makers |= {name: partial(contestants.STARTS[name], setup) for name in plan.peers}
    makers |= {name: partial(contestants.running_already, name, url) for name, url in plan.urls.items()}
    servers = []
    for name, make in makers.items():
        if name in outcome.skipped:
            continue
        try:
            servers.append(ready(make(), setup, stack))
            outcome.servers[name] = servers[-1].start.version
        except Skipped as reason:
            if name == OURS:
                raise
            outcome.skipped[name] = str(reason)
            setup.progress.step(f"{name} is skipped: {reason}")
    return servers


def ready(start: Start, setup: Setup, stack: ExitStack) -> Server:
    """Start one, and wait for it. Raises Skipped."""
    began = time.monotonic()
    if start.command:
        setup.progress.step(f"starting {start.name}, with {setup.kv_tokens:,} tokens of KV")
        setup.progress.note("loading")
    server = Server(start, log_of(setup.scratch, start.name))
    stack.callback(server.close)
    server.wait_ready(setup.progress.tick)
    if not start.model:
        server.start = replace(start, model=first_model(start.url))
    setup.progress.step(f"{start.name} is ready after {time.monotonic() - began:.0f} s")
    server.pause()
    return server


def log_of(directory: Path, name: str) -> Path:
    """Where a server's process writes."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"served-{name}.log"
