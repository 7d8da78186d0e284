"""The roof of decoding: how many tokens a second the machine's read bandwidth allows, measured in the same run.

    python -m benchmarks.cpu.roof --threads N        prints the bandwidth in bytes a second

A process of its own, so that no thread of it is left behind while engines are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

BUFFER_BYTES = 512 * 2**20  # far more than any cache holds
REPEATS = 10


def tokens_per_s(concurrency: int, step_bytes: float, bandwidth: float) -> float:
    """Of decode steps that do nothing but read `step_bytes` at `bandwidth` bytes a second."""
    return concurrency * bandwidth / step_bytes


def measure_bandwidth(threads: int) -> float:
    """Bytes a second, the best of what reading one stream (sum, amax) and two streams (dot) reaches."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(BUFFER_BYTES // 4)
    halves = values.chunk(2)
    return max(
        _best_rate(values.sum),
        _best_rate(values.amax),
        _best_rate(lambda: torch.dot(*halves)),
    )


def _best_rate(read: Callable[[], object]) -> float:
    read()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    return BUFFER_BYTES / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the read bandwidth.")
    parser.add_argument("--threads", type=int, required=True)
    print(measure_bandwidth(parser.parse_args().threads))


if __name__ == "__main__":
    main()
