"""One tritonserver with its stubs and engine, from start to nothing left.

    with TritonServer(config, Ports.free(), run_dir) as server:   # started, not yet ready
        server.wait_ready(120)                                     # ready, and one real token was generated
        ... server.http_url, server.grpc_url, server.metrics_url, server.stub_pids()

Order of side effects in start(): ports are checked, then files are written, then the janitor is started, then the
server. In stop(): SIGUSR1 to the stubs (drain), SIGTERM to the server, wait, SIGKILL to whatever carries the run id,
shared memory unlinked, janitor released. stop() is idempotent and start() may be called again after it.

The server is killed by the kernel when the *thread* that called start() ends: call it from a thread that lives long
enough.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from backend.api.config import EngineConfig
from deploy import ROOT, health, invocation, log_files, memory, probe, rundir, secret_flags, server_log
from deploy.errors import Failure, ServerFailed, StartCancelled
from deploy.monitor import Monitor
from deploy.ports import Ports, reachable, url_host
from deploy.processes import (
    Process,
    catches,
    describe_end,
    kill_run,
    processes_of_run,
    remove_shared_memory,
    send_signal,
    stubs_of,
)
from deploy.questions import Asked, text_model
from deploy.readiness import Readiness
from deploy.repository import compile_models, compose, render

SHM_PREFIX = "triton_python_backend_shm_region_"  # Triton's own prefix, to which each server appends its run id
KILL_MARGIN_S = 2.0  # time past the exit timeout, for a server that an open gRPC stream still holds
FOLLOWERS_S = 2.0
# Once all requests are over. Triton's gRPC front may keep a finished request, and with it a model that then never unloads
# (seen with 24.10, about every third time), so it is of no use to wait until the exit timeout is over.
UNLOAD_S = 4.0
_POLL_S = 0.1

log = logging.getLogger("everbatch.server")


class TritonServer:
    """A supervised server process. Not thread-safe: one thread starts, waits and stops."""

    def __init__(
        self,
        config: EngineConfig,
        ports: Ports | None = None,
        run_dir: Path | None = None,
        *,
        profiles: Sequence[str] = (),
        model_repository: Path | Sequence[Path] = (),
        host: str = "127.0.0.1",
        log_path: Path | None = None,
        exit_timeout_s: int = 30,
        probe_model: str | None = "",
        log_format: str = "text",
        extra_flags: Sequence[str] = (),
        extra_environment: dict[str, str] | None = None,
        on_event: Callable[[str], None] = log.warning,
    ) -> None:
        """Describe a server; nothing happens yet. Raises UserError when its models cannot be served together.

        `ports`: free ones are chosen when unset. `run_dir`: .run/server-<http port> when unset. `profiles` and
        `model_repository`: what is served (deploy/repository.py). `probe_model`: the text model that must generate one token
        before the server counts as ready, one of those served when it is ""; None asks the readiness endpoint only.
        `on_event`: called with a sentence when something happens that the server lives through (an engine that ended, not
        ready, ready again), in a thread of its own.
        """
        self.config = config
        self.host = host
        self.ports = ports or Ports.free(host)
        self.run_dir = Path(run_dir or rundir.default_run_directory(f"server-{self.ports.http}")).resolve()
        self.log_path = log_path or self.run_dir / "server.log"
        self.exit_timeout_s = exit_timeout_s
        self.on_event = on_event
        self.admin_key = secrets.token_hex(16)
        self.run_id = os.environ.get("EVERBATCH_RUN_PREFIX", "") + secrets.token_hex(8)
        self.log_format = log_format
        repositories = (model_repository,) if isinstance(model_repository, Path) else model_repository
        self.models = compose(profiles, repositories)
        self.text_model = None if probe_model is None else text_model(self.models, probe_model)
        self._extra_flags = tuple(extra_flags)
        self._extra_environment = extra_environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._temporary_socket_directory: Path | None = None
        self._stubs: list[Process] = []
        self._known: list[Process] = []  # all processes of this server at the beginning of stop()
        self._health_directory: Path | None = None
        self._monitor: Monitor | None = None
        self._memory_limit: int | None = None

    # ---- addresses ---------------------------------------------------------------------------------------------------

    @property
    def http_url(self) -> str:
        return f"http://{url_host(reachable(self.host))}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{url_host(reachable(self.host))}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{url_host(reachable(self.host))}:{self.ports.metrics}/metrics"

    # ---- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server process. Raises UserError before anything was started, ServerFailed if it cannot be executed."""
        if self._process is not None:
            raise RuntimeError(f"the server on port {self.ports.http} is already started; stop() it first")
        self.ports.check_free(self.host)
        installation = invocation.find_installation()
        compile_models(self.models)
        rundir.prepare_run_directory(self.run_dir)
        backends = invocation.prepare_backend_directory(installation, self.run_dir / "backends")
        repository = render(self.models, self.run_dir / "models", decoupled=self.config.triton.decoupled)
        config_file = rundir.write_config(self.run_dir, self.config)
        rundir.write_private(self.run_dir / "admin.key", self.admin_key + "\n")
        sockets, temporary = rundir.socket_directory(self.run_dir)
        self._temporary_socket_directory = sockets if temporary else None
        self._health_directory = sockets / "health"
        health.clear(self._health_directory)
        command = invocation.command_line(
            installation,
            repository=repository,
            backend_directory=backends,
            host=self.host,
            ports=self.ports,
            shm_prefix=self._shm_prefix,
            exit_timeout_s=self.exit_timeout_s,
            complete=all(model.tensors for model in self.models),
            extra=self._extra_flags,
        )
        variables = invocation.environment(
            installation,
            config_file=config_file,
            socket_directory=sockets,
            run_id=self.run_id,
            admin_key=self.admin_key,
            exit_timeout_s=self.exit_timeout_s,
            log_format=self.log_format,
        )
        self._start_janitor()
        self._start_process(command, variables | self._extra_environment)

    def wait_ready(
        self,
        timeout_s: float = 120.0,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Block until one real token came out of the server. `on_phase` is told what is being waited for.

        Raises ServerFailed (with the log's tail) when the server ends or `timeout_s` passes, StartCancelled on request.
        """
        deadline = time.monotonic() + timeout_s
        phase = "the models"
        on_phase("loading the models")
        while not probe.is_ready(self.http_url):
            self._check_start(deadline, timeout_s, cancelled)
            time.sleep(_POLL_S)  # Triton tells nobody that its models are loaded, so it is asked again.
            said = server_log.engine_phase(server_log.tail(self.log_path))
            if said is not None and said != phase:
                phase = said
                on_phase(f"engine: {phase}")
        self._stubs = stubs_of(self.pid)
        if self.text_model is not None:
            on_phase("generating a first token")
            self._generate_first_token(self.text_model, deadline)
        if dead := self.dead_stubs():
            raise ServerFailed(f"stub process {dead[0].pid} died while the server started", self.log_tail())
        self._watch()

    def stop(self, *, timeout_s: float | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """End the server and everything it started; drain for at most `timeout_s` (the exit timeout when unset).

        With `cancelled()` true the rest of the wait is skipped. Afterwards no process and no shared memory of it is
        left.
        """
        self._stop_watching()
        if self._process is not None:
            self._known = processes_of_run(self.run_id)
            self._drain(self.exit_timeout_s + KILL_MARGIN_S if timeout_s is None else timeout_s, cancelled)
        self._sweep()

    def kill(self) -> None:
        """End everything at once, without draining."""
        self._sweep()

    # ---- supervision -------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The server's process id. Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError("the server is not started; call start() first")
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The server's exit status (negative: the signal that ended it), None while it runs."""
        return None if self._process is None else self._process.poll()

    def stub_pids(self) -> list[int]:
        """Process ids of the stubs that live now."""
        return [process.pid for process in stubs_of(self.pid)] if self.running() else []

    def failure(self) -> Failure | None:
        """Why a server that was ready must be ended now; None = all is well, or wait_ready() has not returned yet."""
        if not self.running():
            return Failure(f"tritonserver {describe_end(self.exit_status or 0)}; {log_files.where(self.log_path)}")
        if dead := self.dead_stubs():
            return Failure(f"stub process {dead[0].pid} died; {log_files.where(self.log_path)}")
        if self._monitor is not None and (found := self._monitor.failure()):
            return found
        return self._too_large()

    def dead_stubs(self) -> list[Process]:
        """Stubs that were there when the server became ready and have died since, which Triton itself never tells."""
        dead = [stub for stub in self._stubs if not stub.alive()]
        unloaded = health.unloaded(self._health_directory) if dead and self._health_directory else set()
        self._stubs = [stub for stub in self._stubs if stub.pid not in unloaded]
        return [stub for stub in dead if stub.pid not in unloaded]

    def processes(self) -> list[int]:
        """Process ids of everything that belongs to this server: itself, stubs, engine, ranks."""
        return [process.pid for process in processes_of_run(self.run_id)]

    def log_tail(self) -> str:
        """The last telling lines that the server, its stubs and the engine wrote."""
        return "\n".join(server_log.telling_lines(server_log.tail(self.log_path)))

    @property
    def _shm_prefix(self) -> str:
        return f"{SHM_PREFIX}{self.run_id}_"

    def _start_janitor(self) -> None:
        command = [sys.executable, "-P", "-m", "deploy.janitor", self.run_id, self._shm_prefix]
        if self._temporary_socket_directory is not None:
            command.append(str(self._temporary_socket_directory))
        self._janitor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone.
            env={"PYTHONPATH": str(ROOT)},
        )

    def _start_process(self, command: list[str], variables: dict[str, str]) -> None:
        with log_files.begin(self.log_path) as log:
            self._process = self._spawn(command, variables, log)
            try:
                secret_flags.reveal(self.pid)
            except secret_flags.NotTraced:
                pass  # It runs with its flags in sight and has said so in the log, or it has ended, which is seen later.
            except OSError as error:
                self._process.kill()
                self._process.wait()
                log.write(f"everbatch: every user of this machine sees the admin key ({error.strerror})\n".encode())
                self._process = self._spawn(secret_flags.visible(command, variables), variables, log)
        memory.spare_children_the_stack(self.pid)

    def _spawn(self, command: list[str], variables: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
        spawn = [sys.executable, "-P", "-m", "deploy.spawn", str(os.getpid()), str(memory.stack_bytes())]
        return subprocess.Popen(
            spawn + command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )

    def _watch(self) -> None:
        """Look after the server from now on, until it is stopped."""
        self._memory_limit = memory.limit_bytes(self.pid)
        model = self.text_model.name if self.text_model else self.models[0].name
        self._monitor = Monitor(
            self.http_url,
            self._health_directory or self.run_dir / "health",
            self.log_path,
            Readiness(self.http_url, self.admin_key, model),
            self.dead_stubs,
            self.config.triton.watchdog_timeout_s,
            self.on_event,
        )
        self._monitor.start()

    def _stop_watching(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _too_large(self) -> Failure | None:
        try:
            resident = memory.resident_bytes(self.pid)
        except (FileNotFoundError, ProcessLookupError):  # It has just ended, and the next look says so.
            return None
        if self._memory_limit is None or resident <= self._memory_limit:
            return None
        limit = f"{self._memory_limit / 1e9:.1f} GB, half of what was free"
        return Failure(
            f"tritonserver occupies {resident / 1e9:.1f} GB, allowed are {limit}; limit the size of requests"
        )

    def _check_start(self, deadline: float, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise StartCancelled
        if not self.running():
            if reason := server_log.reason(server_log.tail(self.log_path)):
                raise ServerFailed(reason)
            raise ServerFailed(
                f"tritonserver {describe_end(self.exit_status or 0)} while it started; the whole log is {self.log_path}",
                self.log_tail(),
                by_chance=server_log.died_by_chance(server_log.tail(self.log_path)),
            )
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"tritonserver was not ready after {timeout_s:.0f} s; the whole log is {self.log_path}", self.log_tail()
            )

    def _generate_first_token(self, asked: Asked, deadline: float) -> None:
        remaining = max(5.0, deadline - time.monotonic())
        try:
            probe.generate_one_token(self.http_url, asked, timeout_s=remaining)
        except probe.ProbeFailed as failure:
            raise ServerFailed(f"the server is up but does not generate: {failure}", self.log_tail()) from None

    def _drain(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Ask politely: SIGUSR1 to stubs that have a handler for it (its default would kill them), SIGTERM to the
        server.
        """
        process = self._process
        if process is not None and process.poll() is None:
            for stub in stubs_of(process.pid):
                if catches(stub.pid, signal.SIGUSR1):
                    send_signal(stub, signal.SIGUSR1)
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        unloading = False
        while self.running() and time.monotonic() < deadline and not cancelled():
            time.sleep(_POLL_S / 2)  # Its end, a line of its log and `cancelled` are waited for, all three.
            if not unloading and server_log.is_unloading(server_log.tail(self.log_path)):
                unloading, deadline = True, min(deadline, time.monotonic() + UNLOAD_S)
        followers = min(deadline, time.monotonic() + FOLLOWERS_S)
        while processes_of_run(self.run_id) and time.monotonic() < followers and not cancelled():
            time.sleep(_POLL_S / 2)  # Stubs and engine end by themselves, and may start others until then.

    def _sweep(self) -> None:
        """Kill and remove whatever is left, then let the janitor go (it finds nothing to do)."""
        self._stop_watching()
        left = kill_run(self.run_id, known=self._known)
        self._known = []
        if self._process is not None:
            self._process.wait()
            self._process = None
        remove_shared_memory(self._shm_prefix)
        if self._temporary_socket_directory is not None:
            shutil.rmtree(self._temporary_socket_directory, ignore_errors=True)
            self._temporary_socket_directory = None
        if self._janitor is not None:
            self._janitor.communicate()  # This closes its input, which is what it waits for.
            self._janitor = None
        self._stubs = []
        if left:
            raise ServerFailed(f"processes {left} of the server did not end after SIGKILL; look at them with ps")
