"""Carries a plan out: starts the servers of a phase, lets every cell alternate between them, collects the figures.

There are two phases, because they differ in the KV that the servers get: requests that have nothing to do with each other, and
conversations. In a phase all servers run at the same time; those that bear it are stopped (SIGSTOP) while another is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from benchmarks.peers.environments import BENCH
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import Model
from benchmarks.served import contestants, drive_python
from benchmarks.served.answers import Answer, DriverFailed, figures_of
from benchmarks.served.contestants import Setup
from benchmarks.served.options import OURS, Plan
from benchmarks.served.servers import Server, Start
from benchmarks.served.wire import first_model
from benchmarks.served.work import Ask, Cell, asks_of, kv_tokens_for, warm_asks
from deploy.progress import SteppedProgress

WARM_S = 300.0


class Drive(Protocol):
    """Sends the requests of a cell. Raises DriverFailed."""

    def __call__(self, start: Start, wire: str, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]: ...


@dataclass(frozen=True)
class Lane:
    """A server by one of its wires: what is compared."""

    server: Server
    wire: str

    @property
    def name(self) -> str:
        """`everbatch`, or with a Triton wire `everbatch-grpc`."""
        name = self.server.start.name
        return name if self.wire == "openai" else f"{name}-{self.wire}"


@dataclass
class Row:
    """What one lane reached in one cell: the figures of each repeat, or why there are none."""

    cell: Cell
    lane: str
    driver: str
    repeats: list[dict[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """`servers`: what took part, with its version. `skipped`: reasons by name. `load`: the system's, before anything started."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    servers: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def row(self, cell: Cell, lane: Lane, driver: str) -> Row:
        """The row of a cell and a lane, made if need be."""
        return self.rows.setdefault((cell.name, lane.name), Row(cell, lane.name, driver))


@dataclass(frozen=True)
class Drivers:
    """`openai`: of OpenAI's wire, with its name; Triton's wires have the driver in Python."""

    openai: Drive
    openai_name: str

    def of(self, wire: str) -> tuple[Drive, str]:
        """The driver of a wire and its name."""
        return (self.openai, self.openai_name) if wire == "openai" else (drive_python.run, drive_python.NAME)


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
            servers = started(plan, setup, outcome, stack)
            lanes = lanes_of(servers, plan.wires)
            for repeat in range(plan.repeats):
                for place, cell in enumerate(cells):
                    for lane in lanes:
                        outcome.row(cell, lane, drivers.of(lane.wire)[1])  # so that results have them in this order
                    turn = (repeat + place) % len(lanes)  # each server is the first in turn
                    for lane in (*lanes[turn:], *lanes[:turn]):
                        one(plan, model, cell, lane, repeat, drivers, outcome, progress)


def lanes_of(servers: Sequence[Server], wires: Sequence[str]) -> list[Lane]:
    """Every server by OpenAI's wire, and this one by its others."""
    lanes = [Lane(server, "openai") for server in servers if "openai" in wires or server.start.name != OURS]
    own = [server for server in servers if server.start.name == OURS]
    return [*lanes, *(Lane(server, wire) for server in own for wire in wires if wire != "openai")]


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
            servers.append(_ready(make, setup, stack))
            outcome.servers[name] = servers[-1].start.version
        except Skipped as reason:
            if name == OURS:
                raise
            outcome.skipped[name] = str(reason)
            setup.progress.step(f"{name} is skipped: {reason}")
    return servers


def _ready(make: Callable[[], Start], setup: Setup, stack: ExitStack) -> Server:
    """Start one, and wait for it. Raises Skipped."""
    start = make()
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


def one(
    plan: Plan,
    model: Model,
    cell: Cell,
    lane: Lane,
    repeat: int,
    drivers: Drivers,
    outcome: Outcome,
    progress: SteppedProgress,
) -> None:
    """Measure one lane in one cell once, after some short requests that do not count."""
    drive, name = drivers.of(lane.wire)
    row = outcome.row(cell, lane, name)
    asks = asks_of(cell, model.vocab_size, repeat, plan.per_user)
    warm = warm_asks(cell.users, model.vocab_size, f"{cell.name} {repeat} {lane.name}")
    seconds = plan.seconds * cell.turns if cell.conversations else plan.seconds
    progress.note(f"{cell.name}, {lane.name}, {repeat + 1} of {plan.repeats}")
    lane.server.resume()
    try:
        drive_python.run(lane.server.start, lane.wire, warm, cell.users, WARM_S)
        answers = drive(lane.server.start, lane.wire, asks, cell.users, seconds)
        figures = figures_of(answers, plan.limits)
        row.repeats.append(figures)
        progress.step(f"{cell.name}, {lane.name}: {said(figures, answers)}")
    except DriverFailed as reason:
        row.failures.append(str(reason))
        progress.step(f"{cell.name}, {lane.name}: no figures, {reason}")
    finally:
        lane.server.pause()


def said(figures: dict[str, float], answers: Sequence[Answer]) -> str:
    """A measurement in a line of the terminal."""
    text = f"{figures['output_tokens_per_s']:,.1f} tokens/s, first token {figures['first_token_ms_p50']:,.0f} ms"
    errors = [answer.error for answer in answers if answer.error]
    return f"{text}; {len(errors)} requests failed: {errors[0]}" if errors else text
