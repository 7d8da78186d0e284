"""How much memory is free: what the KV pool may be cut from."""

from __future__ import annotations

from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device, or of this machine within its control group's limit."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_bytes(), _cgroup_room_bytes())


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")


def _cgroup_room_bytes() -> int:
    """Room below the cgroup v2 limit; very large where there is none."""
    limit, current = CGROUP / "memory.max", CGROUP / "memory.current"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return 1 << 62
    return max(0, int(limit.read_text()) - int(current.read_text()))
