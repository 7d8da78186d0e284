"""The results as JSON: rows of a cell and a lane, with the figures of each repeat. `bench compare` reads this form."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import cpu_name
from benchmarks.harness.measure import Effort, Outcome, Row

KIND = "everbatch bench served"  # of all results in this form, whichever benchmark made them
VERSION = 1


def document_of(model: dict[str, Any], effort: Effort, outcome: Outcome, **more: Any) -> dict[str, Any]:
    """`model`: what is said of it. `more`: further entries, such as what was left out."""
    return {
        "kind": KIND,
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "load": outcome.load},
        "model": model,
        "options": {
            "seconds": effort.seconds,
            "requests_per_user": effort.per_user,
            "repeats": effort.repeats,
            "limits": asdict(effort.limits),
        },
        "servers": outcome.servers,
        "skipped": outcome.skipped,
        **more,
        "rows": [_row(row) for row in outcome.rows.values()],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "cell": row.cell.name,
        "lane": row.lane,
        "driver": row.driver,
        **asdict(row.cell),
        "median": medians(row.repeats),
        "repeats": row.repeats,
        "failures": row.failures,
    }


def medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the repeats that have it."""
    keys = dict.fromkeys(key for figures in repeats for key in figures)
    return {key: statistics.median(figures[key] for figures in repeats if key in figures) for key in keys}


def write(document: dict[str, Any], directory: Path, name: str) -> Path:
    """NAME.json in the directory."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
