"""A process that has loaded pytest and torch, and forks for each run of tests: `python -m tests.mutants.prepared`.

It reads one JSON object a line from standard input, {"arguments": [...], "environment": {...}, "output": FILE, "timeout_s": 120},
and writes the run's exit status as a line, -1 when the run did not end in time. It holds no module of the product, so that a bug
is planted before anything has been imported, as in a process that was started for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NO_END = -1
ROOT = Path(__file__).parents[2]


class Prepared:
    """Runs of pytest in the root directory, one after the other, each in a fork of one process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.prepared"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
        """pytest's exit status, or NO_END, and what it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as output:
            job = {
                "arguments": arguments,
                "environment": environment,
                "output": output.name,
                "timeout_s": timeout_s,
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline()), output.read()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve() -> None:
    """Run what comes, until standard input ends."""
    import pytest  # noqa: F401
    import torch  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(job["arguments"], job["environment"], job["output"])
        print(_status_of(pid, job["timeout_s"]), file=answers, flush=True)


def _run(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Never returns."""
    status = 2
    try:
        os.setsid()  # so that the processes of tests that do not end are killed with them
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file := os.open(output, os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        import pytest

        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(pid: int, timeout_s: float) -> int:
    """The exit status of a child. It is killed, with the processes of its session's group, when it takes longer."""
    descriptor = os.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], timeout_s)
    os.close(descriptor)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if ended else NO_END


if __name__ == "__main__":
    serve()
