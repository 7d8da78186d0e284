"""Which kernels a step of the engine spends its time in: `python -m benchmarks.gpu.profile [FORMAT:ROWS ...]`, on a GPU.

For each (default: bf16:64 w4a8kv4:64), the kernels of a step in which all rows only generate, Llama-3-8B's shape at 1k tokens:
microseconds and launches a step, and what is left between them.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import stand_in
from benchmarks.gpu.engine.weights import FORMATS, LLAMA_3_8B

if TYPE_CHECKING:
    from benchmarks.gpu.engine.drive import Engine

STEPS = 20
SHOWN = 16  # kernels
DEFAULT = ["bf16:64", "w4a8kv4:64"]


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    stand_in.install_where_missing()
    from benchmarks.gpu.engine import drive

    wanted: dict[str, list[int]] = {}
    for each in arguments or DEFAULT:
        name, _, number = each.partition(":")
        wanted.setdefault(name, []).append(int(number))
    for name, all_rows in wanted.items():
        engine = drive.Engine(LLAMA_3_8B, FORMATS[name], drive.FULL, torch.device("cuda"))
        for rows in all_rows:
            with engine.generating(rows):
                _show(f"{name}, {rows} rows", engine)
        engine.close()
    return 0


def _show(title: str, engine: Engine) -> None:
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - began) / STEPS * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / STEPS
    print(f"\n{title}: {step_us:.0f} us a step, kernels {busy:.0f} us", flush=True)
    for event in events[:SHOWN]:
        us, count = event.self_device_time_total / STEPS, event.count / STEPS
        print(f"{us:9.1f} us {count:6.1f} x {us / max(count, 1e-9):7.1f} us  {event.key[:90]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
