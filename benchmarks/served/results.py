"""The results as JSON."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_name
from benchmarks.served.measure import Outcome, Row
from benchmarks.served.options import Plan

KIND = "everbatch bench served"
VERSION = 1


def document_of(plan: Plan, model: dict[str, Any], driver: str, outcome: Outcome) -> dict[str, Any]:
    """`model`: what is said of it. Each row names the driver that made its figures."""
    return {
        "kind": KIND,
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {"cpu": cpu_name(), "cores": _cores(), "load": outcome.load},
        "model": model,
        "driver": driver,
        "options": {
            "seconds": plan.seconds,
            "requests_per_user": plan.per_user,
            "repeats": plan.repeats,
            "limits": asdict(plan.limits),
            "second_level_mib": plan.second_level,
        },
        "servers": outcome.servers,
        "skipped": outcome.skipped,
        "left_out": list(plan.left_out),
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


def write(document: dict[str, Any], directory: Path) -> Path:
    """served.json of the directory."""
    path = directory / "served.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _cores() -> int:
    return len(os.sched_getaffinity(0))
