"""Whether what a server holds stays flat from one rest to the next: memory, open files, shared memory, logs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

Sample = dict[str, float]  # by name what a server held at one rest


class Limit(NamedTuple):
    """How far the last third of the rests may lie above the first third."""

    absolute: float
    share: float  # of the first third


# By the beginning of a name. Clients that have just left may still hold a socket.
LIMITS = {
    "descriptors": Limit(4, 0.0),
    "shared memory": Limit(1, 0.0),
    "log": Limit(8, 0.0),
    "": Limit(16, 0.05),  # megabytes that a process holds
}
WARM_UP = 1  # rests that do not count: libraries load, pools are touched for the first time


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """By name the medians of the first and of the last third of the rests that count. A name that a rest lacks is left out."""
    counted = samples[WARM_UP:]
    third = max(1, len(counted) // 3)
    names = set.intersection(*map(set, counted)) if len(counted) > 1 else set()
    return {
        name: (
            statistics.median(sample[name] for sample in counted[:third]),
            statistics.median(sample[name] for sample in counted[-third:]),
        )
        for name in sorted(names)
    }


def what_grew(samples: Sequence[Sample]) -> list[str]:
    """In sentences what has grown beyond its limit; nothing where all is flat."""
    told = []
    for name, (first, last) in growth(samples).items():
        limit = next(limit for beginning, limit in LIMITS.items() if name.startswith(beginning))
        allowed = max(limit.absolute, limit.share * first)
        if last - first > allowed:
            told.append(f"{name} grew from {first:.1f} to {last:.1f}; up to {allowed:.1f} more are allowed")
    return told
