"""Tells a process that is slow from one that is dead or stopped, when it gives no sign of life: for the launcher, which waits for
signs of the stubs, and for the stubs, which wait for those of the engine.

Silence is counted in ticks of the listening process, not in seconds, so that a listener that was stopped or starved does not take
others for dead.
A silent process is slow as long as it has run, or has waited for a processor, for most of that time. Linux's /proc only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.25  # seconds between two signs of life, and between two ticks
SILENT_S = 1.25  # the time of five signs
BUSY_S = 10.0  # the same for a process that is slow


def limit_s(busy: bool) -> float:
    """Seconds of silence after which a process counts as not well."""
    return BUSY_S if busy else SILENT_S


@dataclass(frozen=True)
class CpuDemand:
    """`wanted_ns`: for how long its threads have run or have waited for a processor, up to the last time that they ran.
    `waiting`: True if one of them runs or waits for a processor now.
    """

    wanted_ns: int = 0
    waiting: bool = False


def cpu_demand(pid: int) -> CpuDemand:
    """The processor time that a process has used or waited for; zero for a process that is stopped or gone."""
    try:
        threads = [Path(f"/proc/{pid}/task/{name}") for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # The process does not exist, so it demands no processor time.
        return CpuDemand()
    schedules = [_read(thread / "schedstat").split() for thread in threads]
    wanted_ns = sum(int(fields[0]) + int(fields[1]) for fields in schedules if len(fields) > 1)
    return CpuDemand(wanted_ns, any(_state(thread) == b"R" for thread in threads))


class Liveness:
    """The silence of one process. `busy`: True if at the last tick it was slow rather than dead."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """End the silence: the process has given a sign of life."""
        self._ticks = 0
        self._began_ns = self._wanted_ns = 0  # time and processor time at the second tick
        # Set after it was idle for too long. Only a sign of life clears it, not a moment of work.
        self._idle = False
        self.busy = False

    @property
    def silent_s(self) -> float:
        return self._ticks * TICK_S

    @property
    def limit_s(self) -> float:
        return limit_s(self.busy)

    @property
    def is_too_long(self) -> bool:
        return self.silent_s >= self.limit_s

    def tick(self, pid: int | None) -> None:
        """Count one tick without a sign. `pid`: of the process; None: it is not known, and counts as doing nothing."""
        self._ticks += 1
        if self._ticks < 2 or pid is None:  # A sign that is only a little late is not worth reading /proc for.
            return
        now_ns, demand = time.monotonic_ns(), cpu_demand(pid)
        if self._ticks == 2:
            self._began_ns, self._wanted_ns = now_ns, demand.wanted_ns
        busy = demand.waiting or 2 * (demand.wanted_ns - self._wanted_ns) > now_ns - self._began_ns
        self.busy = busy and not self._idle
        self._idle = self.is_too_long


def _state(thread: Path) -> bytes:
    fields = _read(thread / "stat").rpartition(b")")[2].split()  # The name of a thread may hold spaces and brackets.
    return fields[0] if fields else b""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # The thread has ended, or the process belongs to another user and is therefore not one of ours.
        return b""
