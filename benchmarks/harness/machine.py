"""What kind of machine a figure was measured on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kernels.cpu.isa import supported_isas

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Machine(NamedTuple):
    cpu: str
    cores: int  # that this process may use
    caches: dict[str, str]  # of core 0: "L2" -> "512K"; L1 is that of data. Empty where Linux does not tell
    isas: list[str]  # the variants of the native kernels that it runs, best first

    @property
    def summary(self) -> str:
        sizes = ", ".join(f"{level} {size}" for level, size in self.caches.items())
        return f"{self.cpu}, {self.cores} cores, {sizes or 'caches not known'}, {self.isas[0]}"


def describe() -> Machine:
    return Machine(cpu_name(), len(os.sched_getaffinity(0)), _caches(), list(supported_isas()))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _caches() -> dict[str, str]:
    """Level -> size, of the caches that hold data."""
    found = {}
    for index in sorted(_CACHES.glob("index*")):
        read = lambda name, at=index: (at / name).read_text().strip()
        if read("type") != "Instruction":
            found[f"L{read('level')}"] = read("size")
    return found
