"""Ratios of the figures that two files have in common."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from benchmarks.compare.figures import Figure, Key


@dataclass(frozen=True)
class Ratio:
    """`ratio`: above 1 the second file is better, whether more or less is better; from 0 to infinite, as a figure can be 0.

    `spread`: from the least sample to the greatest as a part of their median, of the file where that is more; None where a file
    holds one sample alone.
    """

    key: Key
    before: float
    after: float
    ratio: float
    spread: float | None
    is_beyond: bool

    @property
    def mark(self) -> str:
        """`better` or `worse` where no sample of one file lies among those of the other; else empty."""
        if not self.is_beyond:
            return ""
        return "better" if self.ratio > 1 else "worse"


def ratios_of(before: dict[Key, Figure], after: dict[Key, Figure]) -> list[Ratio]:
    """One for each key that both have, in the order of the second file."""
    return [_ratio(key, before[key], after[key]) for key in after if key in before]


def _ratio(key: Key, before: Figure, after: Figure) -> Ratio:
    first, second = statistics.median(before.samples), statistics.median(after.samples)
    ratio = divided(second, first) if after.more_is_better else divided(first, second)
    has_spread = min(len(before.samples), len(after.samples)) > 1
    spread = max(_spread(before.samples), _spread(after.samples)) if has_spread else None
    apart = min(after.samples) > max(before.samples) or max(after.samples) < min(before.samples)
    return Ratio(key, first, second, ratio, spread, has_spread and apart)


def _spread(samples: list[float]) -> float:
    return divided(max(samples) - min(samples), statistics.median(samples)) if max(samples) > min(samples) else 0.0


def divided(above: float, below: float) -> float:
    """The quotient; 1 of two zeros, infinite where only the second one is zero."""
    if below:
        return above / below
    return math.inf if above else 1.0
