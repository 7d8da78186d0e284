"""What a measured row is held against. A goal is a text for the table and a verdict: stretch, pass or miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Record = dict[str, Any]  # a row's result, as the JSON file has it
Known = Mapping[str, Record]  # all rows' results, by name

ORDER = ("miss", "unknown", "pass", "stretch")


class Goal(NamedTuple):
    text: str
    judge: Callable[[Record, Known], str]  # one of ORDER; unknown: what it compares with has no result


def of_floor(least: float, stretch: float | None = None) -> Goal:
    """The floor's share of the time, at least."""
    text = f">= {least:.0%} of floor" + (f" / {stretch:.0%}" if stretch else "")

    def judge(record: Record, known: Known) -> str:
        return _verdict(record["floor_us"] / record["us"], least, stretch)

    return Goal(text, judge)


def times_floor(most: float) -> Goal:
    return Goal(f"<= {most:g} x floor", lambda record, known: _verdict(record["floor_us"] / record["us"], 1 / most))


def at_most_us(most: float) -> Goal:
    return Goal(f"<= {most:g} us", lambda record, known: _verdict(most / record["us"], 1.0))


def than_peer(name: str, least: float) -> Goal:
    """The goal is the speed divided by the peer's."""

    def judge(record: Record, known: Known) -> str:
        peer = record["peers"].get(name, {}).get("us")
        return "unknown" if peer is None else _verdict(peer / record["us"], least)

    return Goal(f">= {least:g} x the speed of {name}", judge)


def than_row(name: str, least: float) -> Goal:
    """The speed, over that of another row of the table."""

    def judge(record: Record, known: Known) -> str:
        other = known.get(name, {}).get("us")
        return "unknown" if other is None else _verdict(other / record["us"], least)

    return Goal(f">= {least:g} x the speed of '{name}'", judge)


def verdict(goals: tuple[Goal, ...], record: Record, known: Known) -> str:
    """The worst verdict of all goals; "" without a goal."""
    return min((goal.judge(record, known) for goal in goals), key=ORDER.index, default="")


def _verdict(value: float, least: float, stretch: float | None = None) -> str:
    if value < least:
        return "miss"
    return "stretch" if stretch is not None and value >= stretch else "pass"
