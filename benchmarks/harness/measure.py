"""Measures lanes (a server by one of its wires, or an engine) cell by cell, in turns: what disturbs one disturbs all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.harness.answers import Answer, DriverFailed, Limits, figures_of
from benchmarks.harness.work import Ask, Cell, asks_of, warm_asks
from deploy.progress import SteppedProgress

WARM_S = 300.0


class Lane(Protocol):
    """A server by one of its wires, or an engine, measured beside others. `driver`: the program that sends it requests."""

    @property
    def name(self) -> str: ...

    @property
    def driver(self) -> str: ...

    def at_work(self) -> AbstractContextManager[object]:
        """Within this context the lane runs and is measured; outside of it the lane leaves the cores to the other lanes."""
        ...

    def warm(self, asks: Sequence[Ask], users: int, seconds: float) -> None:
        """Send requests that do not count. Raises DriverFailed."""
        ...

    def send(self, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
        """Send the requests, so many at a time, none after `seconds`. Raises DriverFailed."""
        ...


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

    def row(self, cell: Cell, lane: Lane) -> Row:
        """The row of a cell and a lane, made if need be."""
        return self.rows.setdefault((cell.name, lane.name), Row(cell, lane.name, lane.driver))


@dataclass(frozen=True)
class Effort:
    """How much is measured. `seconds`: a cell sends no request later; a conversation has them for each turn."""

    repeats: int
    per_user: int
    seconds: float
    limits: Limits


def alternate(
    cells: Sequence[Cell],
    lanes: Sequence[Lane],
    effort: Effort,
    vocab_size: int,
    outcome: Outcome,
    progress: SteppedProgress,
) -> None:
    """Fill the outcome: in each repeat and cell every lane once, each time another one first."""
    for repeat in range(effort.repeats):
        for place, cell in enumerate(cells):
            for lane in lanes:
                outcome.row(cell, lane)  # so that results have them in this order
            turn = (repeat + place) % len(lanes)
            for lane in (*lanes[turn:], *lanes[:turn]):
                one(cell, lane, repeat, effort, vocab_size, outcome, progress)


def one(
    cell: Cell, lane: Lane, repeat: int, effort: Effort, vocab_size: int, outcome: Outcome, progress: SteppedProgress
) -> None:
    """Measure one lane in one cell once, after some short requests that do not count."""
    asks = asks_of(cell, vocab_size, repeat, effort.per_user)
    warm = warm_asks(cell.users, vocab_size, f"{cell.name} {repeat} {lane.name}")
    seconds = effort.seconds * cell.turns if cell.conversations else effort.seconds
    progress.note(f"{cell.name}, {lane.name}, {repeat + 1} of {effort.repeats}")
    with lane.at_work(), noted(cell, lane, outcome, progress) as keep:
        lane.warm(warm, cell.users, WARM_S)
        keep(lane.send(asks, cell.users, seconds), effort.limits)


class Keep(Protocol):
    def __call__(self, answers: Sequence[Answer], limits: Limits) -> None: ...


@contextmanager
def noted(cell: Cell, lane: Lane, outcome: Outcome, progress: SteppedProgress) -> Iterator[Keep]:
    """Yields what puts the figures of answers into the row; a driver that fails leaves its reason there."""
    row = outcome.row(cell, lane)

    def keep(answers: Sequence[Answer], limits: Limits) -> None:
        row.repeats.append(figures_of(answers, limits))
        progress.step(f"{cell.name}, {lane.name}: {said(row.repeats[-1], answers)}")

    try:
        yield keep
    except DriverFailed as reason:
        row.failures.append(str(reason))
        progress.step(f"{cell.name}, {lane.name}: no figures, {reason}")


def said(figures: dict[str, float], answers: Sequence[Answer]) -> str:
    """A measurement in a line of the terminal."""
    text = f"{figures['output_tokens_per_s']:,.1f} tokens/s, first token {figures['first_token_ms_p50']:,.0f} ms"
    errors = [answer.error for answer in answers if answer.error]
    return f"{text}; {len(errors)} requests failed: {errors[0]}" if errors else text
