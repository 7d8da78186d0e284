"""Small charts as SVG, for the report: a figure against the number of users, a line for each server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.harness.metrics import written

WIDTH, HEIGHT = 240, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 6, 12, 26


@dataclass(frozen=True)
class Point:
    """At a number of users: the median of the repeats, with the least and the greatest."""

    users: int
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Line:
    """`colour`: the name of a CSS variable. `points` are in order of users."""

    name: str
    colour: str
    points: Sequence[Point]


def chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """One chart. Users stand at equal distances, values begin at zero; a thin bar spans the repeats."""
    users = sorted({point.users for line in lines for point in line.points})
    top = nice_top(max((point.most for line in lines for point in line.points), default=1.0))
    across = {each: _LEFT + (place + 0.5) * (WIDTH - _LEFT - _RIGHT) / len(users) for place, each in enumerate(users)}
    height = lambda value: HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)
    parts = [_axis(top, height), *(_user(each, place) for each, place in across.items())]
    for number, line in enumerate(lines):
        shift = (number - (len(lines) - 1) / 2) * 3  # so that the bars of several servers do not hide each other
        places = [(across[point.users] + shift, height(point.median), point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline class="line" style="stroke:var({line.colour})" points="{path}"/>')
        for x, y, point in places:
            parts.append(_dot(line, point, unit, x, y, height(point.least), height(point.most)))
    label = escape(f"{title}, {unit}, against the number of users", quote=True)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def nice_top(value: float) -> float:
    """The end of an axis: 1, 2, 2.5, 4, 5, 6, 8 or 10 times a power of ten, and not less than the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 6, 8, 10, 20) if step * power >= value * 0.999)


def _axis(top: float, height: Callable[[float], float]) -> str:
    parts = []
    for share in (0, 0.5, 1):
        y = height(top * share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = written(top * share) if share else "0"
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _user(users: int, x: float) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{users}</text>'


def _dot(line: Line, point: Point, unit: str, x: float, y: float, low: float, high: float) -> str:
    words = f"{line.name}, {point.users} users: {written(point.median)} {unit}"
    words += f" ({written(point.least)} - {written(point.most)})"
    colour = f"var({line.colour})"
    return (
        f'<g><title>{escape(words)}</title><line class="range" style="stroke:{colour}" x1="{x:.1f}" x2="{x:.1f}" '
        f'y1="{low:.1f}" y2="{high:.1f}"/><circle style="fill:{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/></g>'
    )
