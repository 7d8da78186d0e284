"""EngineProcess: starts the engine process and keeps it running.

Its death is noticed at once (its output ends). It is started again after a pause: 0.5 s, then twice as long each time, at most
30 s. A quiet minute, in which it was ready and well, makes the next death the first again. When it dies once more after
MAX_RESTARTS restarts within WINDOW_S, without a quiet minute between them, it is given up, loudly, and `has_given_up` stays true.
It cannot outlive this process: its standard input is a pipe that ends with us.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from backend.api.config import EngineConfig
from backend.api.errors import ConfigError, EngineUnavailable

log = logging.getLogger("everbatch.supervisor")
ROOT = Path(__file__).resolve().parents[2]
FIRST_PAUSE_S, LONGEST_PAUSE_S, QUIET_S = 0.5, 30.0, 60.0
MAX_RESTARTS, WINDOW_S = 5, 600.0
STOP_GRACE_S = 5.0


class RestartPolicy:
    """When a process that died is started again, and when no more. Told of every death, in order."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._pause_s = FIRST_PAUSE_S

    def pause_after_death(self, now_s: float, served_s: float) -> float | None:
        """Seconds until the next start; None: give up. `served_s`: how long it was ready and well before it died."""
        if served_s > QUIET_S:
            self._deaths.clear()
            self._pause_s = FIRST_PAUSE_S
        if len(self._deaths) == MAX_RESTARTS and now_s - self._deaths[0] < WINDOW_S:
            return None
        self._deaths.append(now_s)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def describe(self, now_s: float) -> str:
        """Why it was given up, for clients and logs."""
        within_s = now_s - self._deaths[0]
        return (
            f"the engine died {MAX_RESTARTS + 1} times in {within_s:.0f} s and is not started again; restart the server"
        )


class EngineProcess:
    def __init__(self, config: EngineConfig, socket_path: str):
        self._config_path = Path(socket_path).with_name("engine-config.json")
        self._socket_path = socket_path
        self._config_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config_path.write_bytes(msgspec.json.encode(config))
        self._limits = config.triton
        self._policy = RestartPolicy()
        self._process: subprocess.Popen[str] | None = None
        self._ready_at_s: float | None = None  # of the process that runs now
        self._stuck_s = 0.0  # of its life, before it was killed for it
        self._first_result: str | None = None  # "" = ready, else the error of the first start
        self._first_known = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # a process is started, or ended, by one thread at a time
        self.num_restarts = 0
        self.num_deaths = 0
        self.num_signs = 0  # starts and status lines (watch.Watched)
        self.why_given_up = ""  # one sentence

    @property
    def has_given_up(self) -> bool:
        return bool(self.why_given_up)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def patience_s(self) -> float | None:
        """How long it may give no sign of life: less when it is ready than while it loads. None while there is none."""
        process = self._process
        if process is None or process.poll() is not None:
            return None
        return self._limits.attach_timeout_s if self._ready_at_s is None else self._limits.watchdog_timeout_s

    @property
    def longest_turn_s(self) -> float:
        """How long it may be in one step. A legal one can take long: 40 s were seen for 2,048 prompt tokens of a model of 1.1 B
        on two cores that nobody else used, and more than 60 s on busy ones.
        """
        return self._limits.step_timeout_s

    def start(self, timeout_s: float) -> None:
        """Start, and block until the engine is ready. Raises ConfigError or EngineUnavailable with its own words."""
        self._spawn()
        threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True).start()
        if not self._first_known.wait(timeout_s):
            self.stop()
            raise EngineUnavailable(f"the engine was not ready after {timeout_s:g} s (triton.attach_timeout_s)")
        if self._first_result:
            self.stop()
            raise ConfigError(self._first_result)

    def stop(self) -> None:
        """End the process: politely, then by force. No restart follows."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, reason: str, stuck_s: float) -> None:
        """End a process that hangs; it is started again. By force: one that is stopped would not notice anything else."""
        with self._lock:
            log.error("the engine process %s %s; it is killed", self.pid, reason)
            self._stuck_s = stuck_s
            self._process.kill()

    def _spawn(self) -> None:
        """Start a process, unless it is too late for one."""
        python = os.environ.get("EVERBATCH_PYTHON") or sys.executable
        arguments = ["--config", str(self._config_path), "--socket", self._socket_path]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self._lock:
            if self._stopping.is_set():
                return
            self._ready_at_s, self._stuck_s = None, 0.0
            self._process = subprocess.Popen(
                [python, "-m", "backend.executor.engine_process", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
                text=True,
                errors="replace",
            )
            self.num_signs += 1

    def _supervise(self) -> None:
        """Read what the process says; when it ends, start it again unless it was stopped or never became ready."""
        while True:
            self._listen()
            code = self._process.wait()
            if not self._first_known.is_set():
                self._first_result = f"the engine process ended with code {code} while it was loading; its log says why"
                self._first_known.set()
            if self._stopping.is_set() or self._first_result:
                return
            pause_s = self._book_death(time.monotonic())
            if pause_s is None:
                log.critical("%s", self.why_given_up)
                return
            log.error("the engine process ended with code %d; it is started again in %.1f s", code, pause_s)
            if self._stopping.wait(pause_s):
                return
            self.num_restarts += 1
            try:
                self._spawn()
            except OSError as error:
                log.error("the engine process cannot be started: %s", error.strerror)  # which counts as its next death

    def _book_death(self, now_s: float) -> float | None:
        """Returns the pause before the next start, None when there will be none."""
        served_s = 0.0 if self._ready_at_s is None else now_s - self._ready_at_s - self._stuck_s
        pause_s = self._policy.pause_after_death(now_s, served_s)
        if pause_s is None:
            self.why_given_up = self._policy.describe(now_s)
        self.num_deaths += 1
        return pause_s

    def _listen(self) -> None:
        """Follow the process's status lines until its output ends."""
        for line in self._process.stdout:
            status = _status_of(line)
            if status is None:
                log.info("engine: %s", line.rstrip())
                continue
            self.num_signs += 1
            if "phase" in status:
                log.info("engine: %s", status["phase"])
                continue
            if "ready" in status:
                self._ready_at_s = time.monotonic()
            if "error" in status:
                log.error("engine: %s", status["error"])
            if not self._first_known.is_set():
                self._first_result = status.get("error", "")
                self._first_known.set()


def _status_of(line: str) -> dict[str, str] | None:
    """A status line's content; None for anything else that was written to the standard output."""
    try:
        status = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return status if isinstance(status, dict) else None
