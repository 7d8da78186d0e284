"""Measures the memory that is free for the KV pool, and that the process holds."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import torch

from backend.core.step import MemoryUse

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device, or of this machine within its control group's limit.

    What torch's allocator keeps on a CUDA device after a dummy run counts as taken: the steps to come need it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.mem_get_info(device)[0]
    return host_free_bytes(PROC, CGROUP)


def memory_use(device: torch.device, proc: Path = PROC, children: Iterable[int] = ()) -> MemoryUse:
    """Memory of this process and these children: resident, and on a CUDA device that of torch's allocator.

    Raises OSError when a child has ended.
    """
    processes = ("self", *map(str, children))
    num_pages = sum(int((proc / process / "statm").read_text().split()[1]) for process in processes)
    gpu_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return MemoryUse(num_pages * resource.getpagesize(), gpu_bytes)


def host_free_bytes(proc: Path, cgroup: Path) -> int:
    """MemAvailable of `proc`/meminfo, or the room below the tightest cgroup v2 limit of this process, if less."""
    return min([_available_bytes(proc), *(_room_bytes(group) for group in _groups(proc, cgroup))])


def _available_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """The process's control group and those above it that set a limit."""
    own = proc / "self" / "cgroup"
    lines = own.read_text().splitlines() if own.is_file() else []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    groups = [cgroup / path, *(cgroup / parent for parent in Path(path).parents)]
    return [group for group in groups if _has_limit(group)]


def _has_limit(group: Path) -> bool:
    limit = group / "memory.max"
    return limit.is_file() and limit.read_text().strip() != "max"


def _room_bytes(group: Path) -> int:
    """Limit less use of a control group. Inactive file pages do not count as use, because the kernel frees them on demand."""
    used = int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(0, int((group / "memory.max").read_text()) - used + int(stat.get("inactive_file", 0)))
