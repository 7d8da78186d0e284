"""From the signs of life of a server's stubs (deploy/signs.py) to a verdict about the server.

Triton notices neither a stub that is dead or stopped nor an engine that is gone; the signs tell. A model that gives none (of
a repository of the user's own) is not judged, nor is a stub whose model was unloaded. Pure: reports in, a verdict out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.api.processes.liveness import limit_s

UNLOADED = "unloaded"  # the last state of a stub whose model Triton was asked to unload
DRAINING = "draining"


@dataclass(frozen=True)
class Report:
    """The last sign of life of a stub. `live`: requests that it has not answered in full. `silent_s`: how long ago the sign was
    given. `busy`: whether its process has run, or has waited for a processor, for most of that time. `why`: the reason of its
    state, for a person.
    """

    model: str
    state: str
    pid: int
    live: int = 0
    silent_s: float = 0.0
    busy: bool = False
    why: str = ""

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= limit_s(self.busy)


@dataclass(frozen=True)
class Verdict:
    """`unready`: why requests cannot be served now; None = they can. `given_up`: the model whose engine is not started
    again. `silent`: the stub that has been silent for longest, and for too long.
    """

    unready: str | None = None
    given_up: str | None = None
    silent: Report | None = None


def judge(reports: Sequence[Report]) -> Verdict:
    """The verdict that follows from the stubs' reports."""
    reports = [report for report in reports if report.state != UNLOADED]
    given_up = next((report.model for report in reports if report.state == "given_up"), None)
    silent = max((report for report in reports if report.is_silent), key=lambda r: r.silent_s, default=None)
    unwell = next((report for report in reports if report.state != "ready"), None)
    unready = None
    if silent is not None:
        unready = f"the stub of model {silent.model} (pid {silent.pid}) has been silent for {silent.silent_s:.1f} s"
    elif unwell is not None:
        unready = f"model {unwell.model} is {unwell.state}{f': {unwell.why}' if unwell.why else ''}"
    return Verdict(unready, given_up, silent)


def drained(reports: Sequence[Report]) -> bool:
    """True if every stub has stopped taking requests in and has answered all that it had taken."""
    return all(report.state == UNLOADED or (report.state == DRAINING and report.live == 0) for report in reports)
