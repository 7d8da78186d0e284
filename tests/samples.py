"""Which cases of a parametrised test a run has: a sample, the same one in every run.

The tests of SAMPLED run whole models or kernels in many combinations. In a full run each of them keeps each value of each of its
parameters, so that only combinations are left out: no format, instruction set or family is missing. In a quick run each keeps a
case or some. EVERBATCH_EVERY=1 keeps all cases. A run keeps all, too, that is asked for a test by its name (FILE::TEST) or has a
planted bug.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

EVERY = "EVERBATCH_EVERY"  # set to N: one of N cases, in place of what SAMPLED says


class Share(NamedTuple):
    """A run has one of so many cases of a test; a full run has more where a value would be missing."""

    quick: int
    full: int


SAMPLED = {
    "tests/families/test_gguf.py": Share(20, 16),
    "tests/families/": Share(7, 4),
    "tests/guided/": Share(5, 2),
    "tests/hosted/": Share(10, 4),
    "tests/kernels/compiled/": Share(1, 4),
    "tests/kernels/interpreted/": Share(1, 4),
    "tests/llm/": Share(5, 2),
    "tests/model/": Share(10, 4),
    "tests/native/test_invariance.py": Share(7, 6),
    "tests/native/": Share(10, 4),
    "tests/parity/": Share(10, 4),
    "tests/quant/": Share(7, 4),
    "tests/ranks/": Share(5, 3),
    "tests/sampling/": Share(7, 4),
    "tests/trtllm/test_executor.py": Share(5, 2),
    "tests/trtllm/test_guided.py": Share(5, 2),
    "tests/weight_formats/": Share(10, 4),
}  # beginning of a test's id: its share


def sampled(nodeid: str) -> str | None:
    """The beginning that SAMPLED names, or None."""
    return next((beginning for beginning in SAMPLED if nodeid.startswith(beginning)), None)


def wants_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--mutant", "")) or any("::" in argument for argument in config.args)


def left_of_samples(items: Sequence[pytest.Item], quick: bool) -> Iterator[pytest.Item]:
    """Yield the cases that a run leaves out. pytest may have collected the cases of one test in several places."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.split("[", 1)[0]].append(item)
    for name, cases in tests.items():
        beginning = sampled(name)
        if beginning is None:
            continue
        every = int(os.environ.get(EVERY) or getattr(SAMPLED[beginning], "quick" if quick else "full"))
        if quick:
            kept = set(one_of(every, len(cases), name))
        else:
            # Tests of a file with the same parameters have the same cases, so that what they share is made for these only.
            parameters = f"{name.split('::', 1)[0]} {sorted(cases[0].callspec.params)}"
            kept = sample([set(values(case.callspec.params)) for case in cases], every, parameters)
        yield from (case for index, case in enumerate(cases) if index not in kept)


def one_of(every: int, number: int, name: str) -> range:
    """Indices of one of `every` cases, at least of one. Where they begin follows from the name."""
    return range(zlib.crc32(name.encode()) % min(every, number), number, every)


def sample(cases: Sequence[set[Hashable]], every: int, name: str) -> set[int]:
    """Indices of cases, each a set of values, such that no value is missing and one of `every` cases is there.

    A greedy cover: the case with the most values that are still missing comes next, and of several the first one, counted from a
    place that follows from the name.
    """
    first = zlib.crc32(name.encode()) % len(cases)
    order = [*range(first, len(cases)), *range(first)]
    kept: set[int] = set()
    missing = set().union(*cases)
    while missing:
        best = max(order, key=lambda index: len(missing & cases[index]))
        kept.add(best)
        missing -= cases[best]
    for index in one_of(every, len(cases), name):
        if len(kept) * every < len(cases):
            kept.add(index)
    return kept


def values(parameters: dict[str, object]) -> Iterator[Hashable]:
    """What a case is made of: the value of each parameter, and of a tuple each element. What has no hash is itself only."""
    for name, value in parameters.items():
        if isinstance(value, tuple) and value:
            yield from values({f"{name}.{place}": element for place, element in enumerate(value)})
        else:
            yield name, type(value), value if has_hash(value) else id(value)


def has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # a dataclass may hold a list, so that only an attempt tells
        return False
    return True
