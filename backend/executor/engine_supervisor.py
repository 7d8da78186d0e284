"""EngineProcess: starts the engine process and keeps it running.

The supervisor notices a death at once, because the process's output ends, and starts the process again with back-off
(backend/api/processes/back_off.py). After MAX_RESTARTS restarts without a quiet minute the next death is the last: the process
is given up with a critical log line, and `has_given_up` stays true. It cannot outlive this process, whose end closes the pipe
that is its standard input.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError, EngineUnavailable
from backend.api.processes.back_off import FIRST_DELAY_S, BackOff
from backend.executor.kept_files import KeptFiles
from backend.executor.spare import Spare
from backend.wire.address import GIVEN_UP

log = logging.getLogger("everbatch.supervisor")
ROOT = Path(__file__).resolve().parents[2]
ENGINE, REPLICAS = "backend.executor.engine_process", "backend.replicas.front_process"
MAX_RESTARTS = 5
DEATHS_BEFORE_TRIAL = 2  # that a request must have been in flight at to be run alone (replay.MAX_CRASHES)
STOP_GRACE_S = 5.0


class EngineProcess:
    def __init__(
        self, config: EngineConfig, socket_path: str, owns_directory: bool = False, name: str = "the engine process"
    ) -> None:
        """Write the configuration to a file beside the socket. Nothing is started yet.

        `owns_directory`: the socket's directory was made for this engine, which removes it when this process is killed.
        `name`: how the log calls it.
        """
        self._name = name
        self._owner_pid = os.getpid()
        self._owns_directory = owns_directory
        self._config_path = Path(socket_path).with_name("engine-config.json")
        self._socket_path = socket_path
        self._given_up_path = Path(socket_path).with_name(GIVEN_UP)
        self._config_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config_path.write_bytes(msgspec.json.encode(config))
        self._given_up_path.unlink(missing_ok=True)
        self._program = REPLICAS if config.workers.has_replicas else ENGINE
        self._kept = KeptFiles.make(config)
        self._limits = config.triton
        self._back_off = BackOff(MAX_RESTARTS)
        self._process: subprocess.Popen[str] | None = None
        has_spare = config.triton.spare_engine and not config.workers.has_replicas
        self._spare = Spare(lambda: self._started("--spare")) if has_spare else None
        self._ready_at_s: float | None = None  # when the present process became ready; None while it loads
        self._stuck_s = 0.0  # how long the present process had been stuck when it was killed for that
        self._first_result: str | None = None  # how the first start ended: "" when it became ready, else the error
        self._first_known = threading.Event()
        self._is_on_trial = (
            False  # the engine runs one request alone, which may have ended it before (engine/trials.py)
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # held to start or end a process, which one thread does at a time
        self.num_restarts = 0
        self.num_deaths = 0
        self.num_signs = 0  # the number of starts and status lines (see watch.Watched)
        self.why_given_up = ""  # one sentence, once the process has been given up

    @property
    def has_given_up(self) -> bool:
        return bool(self.why_given_up)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def patience_s(self) -> float | None:
        """How many seconds it may give no sign of life. It may be longer while it loads. None while no process runs."""
        process = self._process
        if process is None or process.poll() is not None:
            return None
        return self._limits.attach_timeout_s if self._ready_at_s is None else self._limits.watchdog_timeout_s

    @property
    def longest_turn_s(self) -> float:
        """How many seconds it may be in one step.

        A proper step can take long: with 2,048 prompt tokens and a model of 1.1 billion parameters, two idle cores took 40 s
        and two busy ones more than 60 s.
        """
        return self._limits.step_timeout_s

    def start(self, timeout_s: float) -> None:
        """Start the process, and block until the engine is ready, for at most `timeout_s` seconds.

        Raises ConfigError with the reason that the process gave, or EngineUnavailable when the time is over or no process can be
        started.
        """
        try:
            self._spawn()
        except OSError as error:
            self.stop()
            raise EngineUnavailable(
                f"the engine process cannot be started: {error.strerror}; free processes or memory, and try again"
            ) from error
        threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True).start()
        if not self._first_known.wait(timeout_s):
            self.stop()
            raise EngineUnavailable(f"the engine was not ready after {timeout_s:g} s (triton.attach_timeout_s)")
        if self._first_result:
            self.stop()
            raise ConfigError(self._first_result)

    def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL after STOP_GRACE_S. It is not started again.

        Does nothing in a process that was forked from the one that started the engine: the engine is not its own.
        """
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._stopping.set()
            process = self._process
            if self._spare is not None:
                self._spare.stop()
            kept, self._kept = self._kept, KeptFiles()
        kept.close()
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, reason: str, stuck_s: float) -> None:
        """End a process that hangs, so that it is started again. Only SIGKILL also ends a process that is stopped.

        `reason` completes a sentence of the log. `stuck_s` is for how long it has hung, which does not count as served.
        """
        with self._lock:
            process = self._process
            assert process is not None, "only a process that runs is watched"
            log.error("%s (pid %d) %s; it is killed", self._name, process.pid, reason)
            self._stuck_s = stuck_s
            process.kill()

    def _spawn(self) -> None:
        """Start a process, or call the spare one, unless `stop` has been called. Raises OSError when it cannot be started."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._ready_at_s, self._stuck_s = None, 0.0
            self._process = (self._spare and self._spare.take()) or self._started()
            self.num_signs += 1

    def _started(self, *more: str) -> subprocess.Popen[str]:
        """A new process, which gets these further arguments."""
        python = os.environ.get("EVERBATCH_PYTHON") or sys.executable
        arguments = ["--config", str(self._config_path), "--socket", self._socket_path, *more]
        if self._owns_directory:
            arguments.append("--owns-directory")
        arguments += self._kept.arguments
        # The modules of this package come first, and those of the user are found behind them, for logits post-processors.
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search_path, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [python, "-m", self._program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            pass_fds=self._kept.descriptors,
            env=environment,
            text=True,
            errors="replace",
        )

    def _prepare_spare(self) -> None:
        with self._lock:
            if self._spare is not None and not self._stopping.is_set():
                self._spare.prepare()

    def _supervise(self) -> None:
        """Follow the process. When it ends, start it again, unless it was stopped, given up or never became ready."""
        while True:
            process = self._process
            assert process is not None and process.stdout is not None, "_spawn has started it with a pipe"
            self._listen(process.stdout)
            code = process.wait()
            if not self._first_known.is_set():
                self._first_result = f"the engine process ended with code {code} while it was loading; its log says why"
                self._first_known.set()
            if self._stopping.is_set() or self._first_result:
                return
            delay_s = self._count_death(time.monotonic())
            if delay_s is None:
                log.critical("%s", self.why_given_up)
                self._given_up_path.touch()
                return
            if self._spare is not None and self._spare.is_there and delay_s <= FIRST_DELAY_S:
                delay_s = 0.0  # a spare costs nothing to call; further ends in a row wait all the same
            log.error("%s ended with code %d; it is started again in %.1f s", self._name, code, delay_s)
            if self._stopping.wait(delay_s):
                return
            self.num_restarts += 1
            try:
                self._spawn()
            except OSError as error:
                # The next turn of this loop finds the old process again, and counts one more death.
                log.error("%s cannot be started: %s", self._name, error.strerror)

    def _count_death(self, now_s: float) -> float | None:
        """Count a death. Returns the seconds to wait before the next start, or None when there will be none."""
        if self._ready_at_s is None:  # it may have been what is in the pool that has ended it
            with self._lock:
                self._kept.empty_pool()
        served_s = 0.0 if self._ready_at_s is None else now_s - self._ready_at_s - self._stuck_s
        if (
            self._is_on_trial
        ):  # one request has caused it, which is not run again, and the deaths that made it a suspect
            self._is_on_trial = False
            self._back_off.forgive(DEATHS_BEFORE_TRIAL + 1)
        delay_s = self._back_off.delay_after_end(now_s, served_s)
        if delay_s is None:
            self.why_given_up = (
                f"the engine died {MAX_RESTARTS + 1} times in {self._back_off.since_first_s(now_s):.0f} s and is not started "
                "again; restart the server"
            )
        self.num_deaths += 1
        return delay_s

    def _listen(self, output: Iterable[str]) -> None:
        """Take in the process's status lines until its output ends."""
        for line in output:
            status = _status_of(line)
            if status is None:
                log.info("engine: %s", line.rstrip())
                continue
            self.num_signs += 1
            if "phase" in status:
                log.info("engine: %s", status["phase"])
                continue
            if "remark" in status:
                log.warning("remark: %s", status["remark"])
                continue
            if "trial" in status:
                self._is_on_trial = bool(status["trial"])
                continue
            if "ready" in status:
                self._ready_at_s = time.monotonic()
                self._prepare_spare()
            if "error" in status:
                log.error("engine: %s", status["error"])
            if not self._first_known.is_set():
                self._first_result = status.get("error", "")
                self._first_known.set()


def _status_of(line: str) -> dict[str, str] | None:
    """The content of a status line; None for any other line that something wrote to the standard output."""
    try:
        status = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return status if isinstance(status, dict) else None
