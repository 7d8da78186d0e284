"""The signs of life of a server's stubs: each writes a line into the pipe RUN_DIR/health.pipe four times a second.

    {"model": "ensemble", "state": "ready" | "unavailable" | "draining" | "given_up" | "unloaded", "pid": 4711, "live": 2,
     "why": "the engine is not connected"}

A pipe needs no room on a disk, so stubs do not look dead when the file system is full. Stubs have different process ids: when
Triton loads a model anew, the old stub and the new one report the same model. Silence is counted in looks of the reader, not
in time, so a launcher that was itself stopped or starved does not take the stubs for dead.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from backend.api.processes.liveness import Liveness
from deploy import health
from deploy.health import Report

PIPE = "health.pipe"

_MAX_LINE = 4096  # PIPE_BUF: what a stub writes at once arrives in one piece


class Signs:
    """Reads the signs of one life of a server. One thread at a time looks; any may ask what was seen."""

    def __init__(self, path: Path) -> None:
        """Make the pipe; what a former server has left in its place is removed."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._path = path
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # to write too: then it never ends
        self._rest = b""
        self._latest: dict[int, Report] = {}
        self._silences: dict[int, Liveness] = {}
        self._num_looks = 0
        self._ended: dict[int, int] = {}  # stubs that have ended -> the number of looks when that was first seen

    def look(self) -> list[Report]:
        """Take in the signs that have come, and count a look of silence for every other stub. Call it every TICK_S seconds."""
        fresh = self._take()
        self._num_looks += 1
        self._silences |= {pid: Liveness() for pid in fresh}
        silent = {pid: self._longer_silent(report) for pid, report in self._latest.items() if pid not in fresh}
        self._latest = silent | fresh  # never changed in place: another thread may read it
        return self.latest

    @property
    def latest(self) -> list[Report]:
        """The last sign of each stub, as of the last look."""
        return list(self._latest.values())

    def unloaded(self) -> set[int]:
        """Process ids of stubs that end because their models are unloaded, as of the last look."""
        return {pid for pid, report in self._latest.items() if report.state == health.UNLOADED}

    def has_said_all(self, pid: int) -> bool:
        """True if what a stub that has ended wrote before its end has been taken in. The first question notes the end; a look may
        be going on then, and one more while the caller reads `unloaded`, so it is known after the third.
        """
        return self._num_looks >= self._ended.setdefault(pid, self._num_looks) + 3

    def model_of(self, pid: int) -> str:
        """The model of a stub, as of its last sign; empty if it has given none."""
        return self._latest[pid].model if pid in self._latest else ""

    def close(self) -> None:
        os.close(self._pipe)
        self._path.unlink(missing_ok=True)

    def _longer_silent(self, report: Report) -> Report:
        silence = self._silences[report.pid]
        silence.tick(report.pid)
        return replace(report, silent_s=silence.silent_s, busy=silence.busy)

    def _take(self) -> dict[int, Report]:
        """The last sign of each stub that has given one since the last look."""
        *lines, self._rest = (self._rest + self._read()).split(b"\n")
        self._rest = self._rest[-_MAX_LINE:]
        return {report.pid: report for line in lines if (report := _report(line)) is not None}

    def _read(self) -> bytes:
        parts = []
        try:
            while part := os.read(self._pipe, 1 << 16):
                parts.append(part)
        except BlockingIOError:  # The pipe is empty.
            pass
        return b"".join(parts)


def _report(line: bytes) -> Report | None:
    """The sign of life in a line; None where there is none in it."""
    try:
        sign = json.loads(line)
        why = str(sign.get("why", ""))
        return Report(str(sign["model"]), str(sign["state"]), int(sign["pid"]), int(sign["live"]), why=why)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
