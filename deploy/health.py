"""What the stubs of a server say about themselves: RUN_DIR/health/MODEL, written four times a second by each model's stub.

    {"state": "ready" | "unavailable" | "draining" | "given_up" | "unloaded", "pid": 4711, "at_ns": CLOCK_MONOTONIC}

Triton notices neither a stub that is dead or stopped nor an engine that is gone; these files tell. A model that writes
none (of a repository of the user's own) is not judged, nor is one that was unloaded. Pure: files and a time in, a verdict
out. Standard library only.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

UNLOADED = "unloaded"  # the last state of a stub whose model Triton was asked to unload
SILENT_S = 1.25  # the time of five signs of life


@dataclass(frozen=True)
class Report:
    """The last sign of life of a model's stub; `age_s`: how long ago it was given."""

    model: str
    state: str
    pid: int
    age_s: float


@dataclass(frozen=True)
class Verdict:
    """`unready`: why requests cannot be served now; None = they can. `given_up`: the model whose engine is not started
    again. `silent`: the longest silent stub and the seconds since its last sign of life.
    """

    unready: str | None = None
    given_up: str | None = None
    silent: Report | None = None


def clear(directory: Path) -> None:
    """Remove what a former server has left in `directory`, so that nothing old is taken for a sign of life."""
    shutil.rmtree(directory, ignore_errors=True)


def read(directory: Path, now_ns: int) -> list[Report]:
    """The reports that lie in `directory`, by model. What cannot be read is left out: files are replaced as a whole,
    so that is never one of a stub of ours.
    """
    found = []
    for path in sorted(directory.glob("[!.]*")):
        try:
            sign = json.loads(path.read_text())
            age_s = (now_ns - int(sign["at_ns"])) / 1e9
            found.append(Report(path.name, str(sign["state"]), int(sign["pid"]), age_s))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # The file is no sign of life of ours (see above), or was removed since the directory was listed.
    return found


def unloaded(directory: Path) -> set[int]:
    """Process ids of stubs that end because their models are unloaded."""
    return {report.pid for report in read(directory, 0) if report.state == UNLOADED}


def judge(reports: list[Report]) -> Verdict:
    """What the reports come to."""
    reports = [report for report in reports if report.state != UNLOADED]
    given_up = next((report.model for report in reports if report.state == "given_up"), None)
    silent = max((report for report in reports if report.age_s > SILENT_S), key=lambda r: r.age_s, default=None)
    busy = next((report for report in reports if report.state != "ready"), None)
    unready = None
    if silent is not None:
        unready = f"the stub of model {silent.model} (pid {silent.pid}) has been silent for {silent.age_s:.1f} s"
    elif busy is not None:
        unready = f"model {busy.model} is {busy.state}"
    return Verdict(unready, given_up, silent)
