"""LimitedProcess: starts a process that does jobs under limits (limited_server.py), sends it jobs and receives their outcomes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from msgspec import Struct

from backend.core.limited_messages import READY, Begin, Drop, Ending, Frames, Limits, Outcome, decode_outcome, frame
from backend.core.limited_server import receive

ROOT = Path(__file__).resolve().parents[2]
END_GRACE_S = 2.0
# One thread and one heap: the process forks, and a child's limit of memory counts what heaps have reserved.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}


class LimitedJob:
    """Work for the process."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()
        self._outcome: Outcome | None = None
        self._lock = threading.Lock()

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome. Only the first call counts."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
                self._has_ended.set()

    def drop(self) -> None:
        """Cancel the job: no request waits for it any more. Any thread may call it."""
        self.finish(Outcome(0, Ending.DROPPED))

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """The outcome. A job that takes longer than `timeout_s` is dropped."""
        if not self._has_ended.wait(timeout_s):
            self.drop()
        assert self._outcome is not None  # set before the event
        return self._outcome


class LimitedProcess:
    """The process starts with the first job, and again after its death. Several threads may call it."""

    def __init__(self, module: str, setup: Struct) -> None:
        """`module`: what the process runs, with the number of its socket as its argument. `setup`: the first message to it."""
        self._module, self._setup = module, setup
        self._lock = threading.Lock()  # held to start the process and to send
        self._running: _Running | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process in advance. Raises OSError if it cannot be started."""
        with self._lock:
            self._started()

    def wait_until_ready(self) -> None:
        """Wait until the process has started, or has failed to."""
        with self._lock:
            running = self._started()
        running.ready.wait()

    def run(self, job: LimitedJob, task: bytes, timeout_s: float | None = None) -> Outcome:
        """Run a job and wait for its outcome, which comes within milliseconds after `drop`. Raises OSError if no process can be
        started.
        """
        with self._lock:
            running = self._started()
            number = running.add(job)
            running.send(Begin(number, task))
        outcome = job.wait(timeout_s)
        if outcome.ending is Ending.DROPPED:
            with self._lock:
                running.send(Drop(number))
        running.forget(number)
        return outcome

    def outcome_of(self, task: bytes, timeout_s: float) -> Outcome:
        """Run a new job, once more where the process ends before it. Raises OSError if no process can be started."""
        outcome = self.run(LimitedJob(), task, timeout_s)
        return self.run(LimitedJob(), task, timeout_s) if outcome.ending is Ending.LOST else outcome

    def close(self) -> None:
        """End the process. Running jobs are lost."""
        with self._lock:
            self._is_closed = True
            running = self._running
        if running is not None:
            running.close()

    def _started(self) -> _Running:
        if self._is_closed:
            raise ConnectionError("jobs are taken no longer")
        if self._running is None or not self._running.is_alive:
            self._running = _Running(self._module, self._setup)
        return self._running


class _Running:
    """The process from one start to its end."""

    def __init__(self, module: str, setup: Struct) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(module, theirs, ours)
        self._connection = ours
        self.ready = LimitedJob()
        self._jobs: dict[int, LimitedJob] = {READY: self.ready}
        self._num_jobs = 0
        self._lock = threading.Lock()
        self.is_alive = True
        self._thread = threading.Thread(target=self._listen, name="limited-outcomes", daemon=True)
        self._thread.start()
        self.send(setup)

    def add(self, job: LimitedJob) -> int:
        """Register a job and return its number."""
        with self._lock:
            self._num_jobs += 1
            self._jobs[self._num_jobs] = job
            return self._num_jobs

    def forget(self, number: int) -> None:
        with self._lock:
            self._jobs.pop(number, None)

    def send(self, message: Struct) -> None:
        try:
            self._connection.sendall(frame(message))
        except OSError:  # the process has died; `_listen` handles the end of the stream
            self._lose_jobs()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the process may have died
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _listen(self) -> None:
        """Pass outcomes on until the stream ends, because the process has died or is being ended."""
        frames = Frames()
        with self._connection:
            while data := receive(self._connection):
                frames.add(data)
                for outcome in map(decode_outcome, frames):
                    with self._lock:
                        job = self._jobs.pop(outcome.job, None)
                    if job is not None:
                        job.finish(outcome)
            self.is_alive = False
        try:
            self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lose_jobs()

    def _lose_jobs(self) -> None:
        self.is_alive = False
        with self._lock:
            lost, self._jobs = self._jobs, {}
        for number, job in lost.items():
            job.finish(Outcome(number, Ending.LOST))


def limit_passed(outcome: Outcome, limits: Limits, patience_s: float) -> str | None:
    """The predicate of a sentence about a job that was ended at a limit; None for one that was not."""
    match outcome.ending:
        case Ending.OVER_CPU:
            return f"takes more than {limits.cpu_s:g} s of processor time"
        case Ending.OVER_MEMORY:
            return f"takes more than {limits.num_bytes} bytes of memory"
        case Ending.DROPPED:
            return f"takes longer than {patience_s:g} s"
    return None


def _spawn(module: str, theirs: socket.socket, ours: socket.socket) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    python = os.environ.get("EVERBATCH_PYTHON") or sys.executable
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        return subprocess.Popen(
            [python, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": search_path},
        )
    except OSError:
        ours.close()
        raise
