"""The machine that a result belongs to: its name, its versions, and what it reaches when nothing is in the way."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from torch import Tensor

from benchmarks.gpu.goals import Record
from benchmarks.gpu.timing import time_calls

# The figures that the goals were made with: one H200. Floors are shown with them where nothing has been measured.
NOMINAL = {"name": "H200 (as planned)", "copy_bytes_s": 4.3e12, "bf16_flop_s": 788e12}
COPY_BYTES = 2 << 30
MATMUL = 8192


def measure(device: torch.device) -> Record:
    """Copy bandwidth (bytes read plus bytes written) and the rate of bfloat16 products of random numbers."""
    record = versions() | {"name": torch.cuda.get_device_name(device)}
    wake(device)
    copies = [torch.randn(2, COPY_BYTES // 8, device=device) for _ in range(2)]
    record["copy_bytes_s"] = COPY_BYTES / min(time_calls(copy, copies).us for copy in (_copied, _negated)) * 1e6
    matrices = [torch.randn(2, MATMUL, MATMUL, device=device).bfloat16() for _ in range(4)]
    for pair in matrices:
        pair[0] @ pair[1]
    record["bf16_flop_s"] = 2 * MATMUL**3 / time_calls(lambda pair: pair[0] @ pair[1], matrices).us * 1e6
    return record


def _copied(pair: Tensor) -> None:
    pair[1].copy_(pair[0])


def _negated(pair: Tensor) -> None:
    """A copy by a kernel: within a CUDA graph, copy engines reached 2.7 TB/s on an H200, and kernels 4.2."""
    torch.neg(pair[0], out=pair[1])


def wake(device: torch.device) -> None:
    """Keep the device busy for some milliseconds: an idle one lowers its clocks while the host compiles."""
    x = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(30):
        x @ x


def versions() -> Record:
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy", "msgspec"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def rate(machine: Record, kind: str) -> float:
    """FLOP/s: int8 products are taken as twice as fast as bfloat16 ones."""
    return machine["bf16_flop_s"] * (2 if kind == "int8" else 1)


def floor_us(machine: Record, num_bytes: float, flops: float = 0, kind: str = "bf16") -> float:
    """No call can be faster."""
    return max(num_bytes / machine["copy_bytes_s"], flops / rate(machine, kind)) * 1e6
