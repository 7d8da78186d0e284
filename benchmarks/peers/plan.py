"""In which order engines are measured: alternately, all of them loaded, or one after the other where memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Action(Enum):
    LOAD = auto()
    WARM_UP = auto()
    MEASURE = auto()
    END = auto()


@dataclass(frozen=True)
class Step:
    """`contestant` is an index; `concurrency` and `repeat` are those of warm-ups and measurements."""

    action: Action
    contestant: int = -1
    concurrency: int = 0
    repeat: int = 0


def alternating(contestants: int, concurrencies: Sequence[int], repeats: int) -> list[Step]:
    """Load all; then for each concurrency and repeat, each contestant in turn: what disturbs one disturbs the others too."""
    everyone = range(contestants)
    steps = [Step(Action.LOAD, index) for index in everyone]
    for concurrency in concurrencies:
        steps += [Step(Action.WARM_UP, index, concurrency) for index in everyone]
        steps += [Step(Action.MEASURE, index, concurrency, repeat) for repeat in range(repeats) for index in everyone]
    return steps + [Step(Action.END, index) for index in everyone]


def one_by_one(contestants: int, concurrencies: Sequence[int], repeats: int) -> list[Step]:
    """Each contestant is loaded, measured and ended before the next."""
    steps = []
    for index in range(contestants):
        steps.append(Step(Action.LOAD, index))
        for concurrency in concurrencies:
            steps.append(Step(Action.WARM_UP, index, concurrency))
            steps += [Step(Action.MEASURE, index, concurrency, repeat) for repeat in range(repeats)]
        steps.append(Step(Action.END, index))
    return steps
