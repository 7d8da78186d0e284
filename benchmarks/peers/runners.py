"""The controller's side of a runner: start, ask, stop for a while, end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import commands
from benchmarks.peers.errors import Skipped
from benchmarks.peers.protocol import Load, Measure

LOAD_TIMEOUT_S = 1200.0
MEASURE_TIMEOUT_S = 1200.0


class Runner:
    """One engine in a process group of its own. While it is paused (SIGSTOP) not even a spinning thread of it runs."""

    def __init__(self, python: Path, module: str, threads: int, log: Path, tick: Callable[[], None]) -> None:
        self._log_path = log
        self._tick = tick
        self._buffer = b""
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(log.parent / "cache-vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(log.parent / "cache-inductor"),
        }
        with open(log, "wb") as log_file:
            self._process = commands.start(
                [str(python), "-m", module],
                environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, load: Load) -> dict[str, Any]:
        """Returns the versions and the note. Raises Skipped."""
        return self._ask({"load": asdict(load)}, LOAD_TIMEOUT_S)

    def measure(self, measure: Measure) -> dict[str, Any]:
        """A protocol.Timing and the peak resident size. Raises Skipped."""
        return self._ask({"measure": asdict(measure)}, MEASURE_TIMEOUT_S)

    def pause(self) -> None:
        commands.signal_group(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        commands.signal_group(self._process, signal.SIGCONT)

    def close(self) -> None:
        """End it at once, paused or not."""
        if self._process.returncode is None:
            commands.end(self._process)
            self._process.stdin.close()
            self._process.stdout.close()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            os.write(self._process.stdin.fileno(), json.dumps(request).encode() + b"\n")
            answer = json.loads(self._line(time.monotonic() + timeout_s, timeout_s))
        except BrokenPipeError:
            raise Skipped(self._how_it_ended()) from None
        if "error" in answer:
            raise Skipped(answer["error"])
        return answer

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline:
                raise Skipped(f"it did not answer within {timeout_s:.0f} s")
            if not select.select([descriptor], [], [], 1.0)[0]:
                self._tick()
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise Skipped(self._how_it_ended())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        status = commands.end(self._process)
        cause = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = [line.strip() for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended {cause}{f'; its last words: {lines[-1][:200]}' if lines else ''}"
