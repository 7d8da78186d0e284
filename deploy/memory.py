"""How much stack the server's threads get, and how much memory the server may take.

Triton 24.10 takes an HTTP body of any size, parses JSON by recursion (80 bytes of stack for each `[`) and lays 16 bytes on
the stack for each HTTP chunk, so some body overflows any stack. A stack is address space until it is used: it is made as
large as the memory that the server may take, which then runs out first, and that the launcher notices before the machine
does. Linux only.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from deploy.processes import read_stat

MAX_STACK_BYTES = 64 << 30  # 256 stacks of this size take an eighth of the address space.
MIN_STACK_BYTES = 8 << 20  # Linux's own default
THREADS = 256  # A server under load has so many; one that is idle has about 130.
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")  # where a container sees its own limits, with version 2


def stack_bytes() -> int:
    """The stack of one thread of the server: half of the memory there is, less where address space is counted."""
    return _stack_bytes(total_bytes(), _countable_address_space())


def _stack_bytes(total: int, address_space: int | None) -> int:
    """`address_space`: bytes that all stacks together may take; None: unlimited."""
    wanted = min(total // 2, MAX_STACK_BYTES)
    if address_space is not None:
        wanted = min(wanted, address_space // 2 // THREADS)
    return max(MIN_STACK_BYTES, wanted) // PAGE_BYTES * PAGE_BYTES


def _countable_address_space() -> int | None:
    """Bytes left under `ulimit -v`, or under vm.overcommit_memory=2, where unused stacks count as memory."""
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        info = _meminfo()
        limits.append(max(0, info["CommitLimit"] - info["Committed_AS"]))
    return min(limits, default=None)


def spare_children_the_stack(pid: int) -> None:
    """Give the process back the soft stack limit of this one, once its C library has read its own (it has, as soon as
    there is a second thread): its threads keep their large stacks, and the stubs and the engine begin with the usual.

    Does nothing to a process that has ended, or that has but one thread after 5 s.
    """
    deadline = time.monotonic() + 5.0
    try:
        while len(os.listdir(f"/proc/{pid}/task")) < 2:
            stat = read_stat(pid)
            if stat is None or stat.state in "ZX" or time.monotonic() > deadline:
                return
            time.sleep(0.002)  # Only a tracer is notified of another process's new threads, so this polls.
        _, hard = resource.prlimit(pid, resource.RLIMIT_STACK)
        soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
        resource.prlimit(pid, resource.RLIMIT_STACK, (soft, hard))
    except (FileNotFoundError, ProcessLookupError):  # The process has ended; its parent reports why.
        return


def total_bytes() -> int:
    """Memory of this machine, or of this container when that is less."""
    return min(_meminfo()["MemTotal"], _cgroup_number("memory.max", _meminfo()["MemTotal"]))


def limit_bytes(server_pid: int) -> int:
    """The resident memory at which the server has gone too far: half of what is available now, above what it has now.

    Call it once everything is loaded. Raises FileNotFoundError when there is no such process.
    """
    return resident_bytes(server_pid) + available_bytes() // 2


class MemoryWatch:
    """Looks after the memory of a server that has loaded everything. Raises FileNotFoundError when there is no such process."""

    def __init__(self, server_pid: int) -> None:
        self._pid, self._limit = server_pid, limit_bytes(server_pid)

    def too_large(self) -> str:
        """One sentence once the server takes more than it may; empty while all is well, and when it has just ended."""
        try:
            resident = resident_bytes(self._pid)
        except (FileNotFoundError, ProcessLookupError):  # The next look says so.
            return ""
        if resident <= self._limit:
            return ""
        limit = f"{self._limit / 1e9:.1f} GB, half of what was free"
        return f"tritonserver occupies {resident / 1e9:.1f} GB, allowed are {limit}; limit the size of requests"


def available_bytes() -> int:
    """Memory that is available now, on this machine and within this container's limit."""
    info = _meminfo()
    limit = _cgroup_number("memory.max", info["MemTotal"])
    return min(info["MemAvailable"], max(0, limit - _cgroup_number("memory.current", 0)))


def resident_bytes(pid: int) -> int:
    """Memory that the process occupies. Raises FileNotFoundError or ProcessLookupError when it is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _cgroup_number(name: str, otherwise: int) -> int:
    """A limit of the container's own; `otherwise` where there is none ("max", version 1, the root group)."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # There is no such file, or no number in it ("max").
        return otherwise
