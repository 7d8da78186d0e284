"""EngineProcess: starts the engine process and keeps it running.

Its death is noticed at once (its output ends); it is started again after a pause that doubles from 0.5 s to 30 s and falls
back after a quiet minute. After MAX_RESTARTS in WINDOW_S it is given up, loudly. It cannot outlive this process: its standard
input is a pipe that ends with us.
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


class EngineProcess:
    def __init__(self, config: EngineConfig, socket_path: str):
        self._config_path = Path(socket_path).with_name("engine-config.json")
        self._socket_path = socket_path
        self._config_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config_path.write_bytes(msgspec.json.encode(config))
        self._process: subprocess.Popen[str] | None = None
        self._first_result: str | None = None  # "" = ready, else the error of the first start
        self._first_known = threading.Event()
        self._stopping = threading.Event()
        self.num_restarts = 0
        self.has_given_up = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

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

    def _spawn(self) -> None:
        python = os.environ.get("EVERBATCH_PYTHON") or sys.executable
        command = [
            python,
            "-m",
            "backend.engine.process",
            "--config",
            str(self._config_path),
            "--socket",
            self._socket_path,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )

    def _supervise(self) -> None:
        """Read what the process says; when it ends, start it again unless it was stopped or never became ready."""
        deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        pause_s = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            was_ready = self._listen()
            code = self._process.wait()
            if not self._first_known.is_set():
                self._first_result = f"the engine process ended with code {code} while it was loading; its log says why"
                self._first_known.set()
            if self._stopping.is_set() or self._first_result:
                return
            now = time.monotonic()
            if len(deaths) == MAX_RESTARTS and now - deaths[0] < WINDOW_S:
                self.has_given_up = True
                log.critical(
                    "the engine process died %d times in %.0f s; it is not started again",
                    MAX_RESTARTS + 1,
                    now - deaths[0],
                )
                return
            deaths.append(now)
            pause_s = FIRST_PAUSE_S if was_ready and now - started > QUIET_S else min(2 * pause_s, LONGEST_PAUSE_S)
            log.error("the engine process ended with code %d; it is started again in %.1f s", code, pause_s / 2)
            if self._stopping.wait(pause_s / 2):
                return
            self.num_restarts += 1
            self._spawn()

    def _listen(self) -> bool:
        """Follow the process's status lines until its output ends. Returns whether it became ready."""
        was_ready = False
        for line in self._process.stdout:
            try:
                status = json.loads(line)
            except json.JSONDecodeError:
                log.info("engine: %s", line.rstrip())
                continue
            if "phase" in status:
                log.info("engine: %s", status["phase"])
            elif not self._first_known.is_set():
                self._first_result = status.get("error", "")
                self._first_known.set()
            was_ready = was_ready or "ready" in status
        return was_ready
