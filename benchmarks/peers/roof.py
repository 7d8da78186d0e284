"""The roof of decoding: how many tokens a second the machine's read bandwidth allows.

A shared machine's bandwidth changes from minute to minute, so it is read right before and after each measurement, by a process of
its own whose threads sleep in between.

    python -m benchmarks.peers.roof THREADS        for every line it reads, prints the bandwidth in bytes a second
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.peers import commands

BUFFER_BYTES = 512 * 2**20  # far more than any cache holds
REPEATS = 3


def tokens_per_s(concurrency: int, step_bytes: float, bandwidth: float) -> float:
    """Tokens a second of decode steps that do nothing but read `step_bytes` at `bandwidth` bytes a second."""
    return concurrency * bandwidth / step_bytes


class Meter:
    """Reads the bandwidth whenever it is asked."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peers.roof", str(threads)]
        self._process = commands.start(command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.read()  # when it answers it has loaded, and its memory is there

    def read(self) -> float:
        """Bytes a second; takes some tenths of a second. Raises CommandFailed."""
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise commands.CommandFailed(self.close(), ["the read bandwidth cannot be measured; its process has ended"])
        return float(answer)

    def close(self) -> int:
        """End it. Returns its exit status."""
        if self._process.returncode is None:
            commands.end(self._process)
            self._process.stdin.close()
            self._process.stdout.close()
        return self._process.returncode


def _best_rate(read: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    return BUFFER_BYTES / min(times)


def main() -> None:
    """Answer with the best of what reading one stream (sum, amax) and two streams (dot) reaches."""
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    values = torch.ones(BUFFER_BYTES // 4)
    halves = values.chunk(2)
    for _ in sys.stdin:
        rates = map(_best_rate, (values.sum, values.amax, lambda: torch.dot(*halves)))
        print(max(rates), flush=True)


if __name__ == "__main__":
    main()
