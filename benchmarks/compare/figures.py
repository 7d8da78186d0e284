"""The figures of a file of results, whichever benchmark wrote it.

This module reads the results of `served`, `load` and `speculation`, which have one form, and of `peers`. Those of `gpu`,
`quality` and `overhead` have other keys and are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.metrics import METRICS
from benchmarks.harness.results import KIND
from deploy.errors import UserError

LARGEST = 64 << 20  # bytes of a file
READABLE = "served, load, speculation or peers"


class Key(NamedTuple):
    """Names a figure of a result, such as `512:512, 4 users`, `vllm`, `output, tokens/s`: two results are compared by it."""

    cell: str
    name: str
    figure: str


@dataclass(frozen=True)
class Figure:
    """`samples`: a value for each repeat, or the only one that the file holds; they stand for their median."""

    samples: list[float]
    more_is_better: bool


Found = Iterator[tuple[Key, list[float], bool]]  # key, samples, whether more is better


def read(path: Path) -> dict[Key, Figure]:
    """The figures of a file. Raises UserError for one that cannot be read, or that holds results of another kind."""
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} has more than {LARGEST >> 20} MiB; results of benchmarks are smaller")
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise UserError(f"{path} cannot be read ({reason})") from None
    try:
        found = list(_found(document))
    except (KeyError, TypeError, AttributeError, IndexError):
        found = []
    figures = {
        key: Figure([float(sample) for sample in samples], more)
        for key, samples, more in found
        if samples and all(is_figure(sample) for sample in samples)
    }
    if not figures:
        raise UserError(f"{path} holds no figures that can be compared; give results of {READABLE}")
    return figures


def is_figure(value: object) -> bool:
    """Whether it is a number that a benchmark measures."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _found(document: Any) -> Found:
    """Told apart by what they hold."""
    if isinstance(document, dict) and document.get("kind") == KIND:
        return _rows(document)
    if isinstance(document, dict) and "decode_tokens_per_s" in document["rows"][0]:
        return _peers(document)
    return iter(())


def _rows(document: dict[str, Any]) -> Found:
    for row in document["rows"]:
        for metric in METRICS:
            samples = [figures[metric.key] for figures in row["repeats"] if metric.key in figures]
            yield Key(row["cell"], row["lane"], f"{metric.title}, {metric.unit}"), samples, metric.more_is_better


def _peers(document: dict[str, Any]) -> Found:
    """The figures of `bench peers`, whose rows hold the best of the repeats."""
    for row in document["rows"]:
        cell = f"{row['model']} {row['weights']}, {row['concurrency']} at once"
        for phase in ("decode", "prefill"):
            key = Key(cell, f"{row['engine']} {row['setting']}", f"{phase}, tokens/s, best")
            yield key, [row.get(f"{phase}_tokens_per_s")], True
