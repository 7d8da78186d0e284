"""One tritonserver with its stubs and engine, from start to nothing left.

    with TritonServer(config, Ports.free(), run_dir) as server:   # started, not yet ready
        server.wait_ready(120)                                     # ready, and one real token was generated
        ... server.http_url, server.grpc_url, server.metrics_url, server.stub_pids()

Order of side effects in start(): ports are checked, then files are written, then the janitor is started, then the
server. In stop(): the drain (deploy/drain.py), SIGKILL to whatever still carries the run id, shared memory unlinked,
janitor released. stop() is idempotent and start() may be called again after it.

The server is killed by the kernel when the *thread* that called start() ends: call it from a thread that lives long
enough.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from backend.api.config.schema import EngineConfig
from backend.api.processes.liveness import cpu_demand
from deploy import ROOT, foreign, health, invocation, launch, log_files, memory, probe, rundir, running, server_log
from deploy.drain import SERVER_MARGIN_S, ServerStop
from deploy.errors import EndReason, ServerFailed, StartCancelled
from deploy.monitor import Monitor
from deploy.ports import Ports, reachable, url_host
from deploy.processes import (
    Process,
    describe_end,
    kill_run,
    processes_of_run,
    remove_shared_memory,
    stubs_of,
)
from deploy.questions import AskedModel, text_model
from deploy.readiness import Readiness
from deploy.repository import Model, compile_models, repositories_of, served_models
from deploy.running import State
from deploy.signs import PIPE, Signs
from deploy.stubs import Stubs
from deploy.stuck_start import StuckStart
from deploy.triton_control import TritonControl

SHM_PREFIX = "triton_python_backend_shm_region_"  # Triton's own prefix, to which each server appends its run id
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
        open_repository: bool = False,
        extra_flags: Sequence[str] = (),
        extra_environment: dict[str, str] | None = None,
        models: Sequence[Model] | None = None,
        on_event: Callable[[str], None] = log.warning,
    ) -> None:
        """Describe a server; nothing happens yet. Raises UserError when its models cannot be served together.

        `ports`: free ones are chosen when unset. `run_dir`: .run/server-<http port> when unset. `profiles` and
        `model_repository`, or `models`: what is served (deploy/repository.py). `probe_model`: the text model that must generate
        one token before the server counts as ready, one of those served when it is ""; None asks the readiness endpoint only.
        `open_repository`: Triton's model repository API asks for no key. `on_event`: called with a sentence when something
        happens that the server lives through (an engine that ended, not ready, ready again), in a thread of its own.
        """
        self.config = config
        self.host, self.ports = host, ports or Ports.free(host)
        self.openai_url = ""  # set by the endpoint beside it
        self.run_dir = Path(run_dir or rundir.default_run_directory(f"server-{self.ports.http}")).resolve()
        self.log_path = log_path or self.run_dir / "server.log"
        self.exit_timeout_s = exit_timeout_s
        self.on_event = on_event
        self.admin_key = secrets.token_hex(16)
        self.run_id = os.environ.get("EVERBATCH_RUN_PREFIX", "") + secrets.token_hex(8)
        self.log_format = log_format
        repositories = (model_repository,) if isinstance(model_repository, Path) else model_repository
        self.models = served_models(config, profiles, repositories) if models is None else list(models)
        self.text_model = None if probe_model is None else text_model(self.models, probe_model)
        self._open_repository = open_repository
        self._extra_flags = tuple(extra_flags)
        self._extra_environment = extra_environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._temporary_directory: Path | None = None
        self._stubs: Stubs | None = None
        self._known: list[Process] = []  # all processes of this server at the beginning of stop()
        self._signs: Signs | None = None
        self._monitor: Monitor | None = None
        self._memory: memory.MemoryWatch | None = None
        self._stuck_start = StuckStart(self.log_path, self._stubs_work)

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

    @property
    def control_path(self) -> Path | None:
        """Socket of operations on models, where there are several."""
        return None

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
        config_file = rundir.write_config(self.run_dir, self.config)
        rundir.write_private(self.run_dir / "admin.key", self.admin_key + "\n")
        place, temporary = rundir.plain_directory(self.run_dir)
        self._temporary_directory = place if temporary else None
        backends = invocation.prepare_backend_directory(installation, place / "backends")
        repositories = self._lay_out(place)
        self._signs = Signs(place / PIPE)
        command = invocation.command_line(
            installation,
            repositories=repositories,
            backend_directory=backends,
            host=self.host,
            ports=self.ports,
            shm_prefix=self._shm_prefix,
            exit_timeout_s=self.exit_timeout_s + SERVER_MARGIN_S,
            complete=all(model.tensors for model in self.models),
            num_models=len(self.models),
            exits_on_error=not foreign.models_of(self.models),
            extra=(*invocation.tracing_flags(self.config, self._extra_environment), *self._extra_flags),
        )
        variables = invocation.environment(
            installation,
            config_file=config_file,
            socket_directory=place,
            code=rundir.plain_way(ROOT, place),
            run_id=self.run_id,
            admin_key=self.admin_key,
            open_repository=self._open_repository,
            exit_timeout_s=self.exit_timeout_s,
            log_format=self.log_format,
        )
        self._start_janitor()
        self._tell("starting")
        self._stuck_start = StuckStart(self.log_path, self._stubs_work)
        self._start_process(command, variables | self._extra_environment)

    def wait_ready(
        self,
        timeout_s: float = 120.0,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Block until one real token came out of the server. `on_phase` gets the phase that is being waited for.

        Raises ServerFailed (with the log's tail) when the server ends or `timeout_s` passes, StartCancelled on request.
        """
        deadline = time.monotonic() + timeout_s
        phase = "the models"
        on_phase("loading the models")
        while not probe.is_ready(self.http_url):
            self._check_start(deadline, timeout_s, cancelled)
            foreign.leave_out_broken(self.models, self.http_url, self.admin_key, self.log_path, self.on_event)
            if self._stuck_start.look():
                text = f"tritonserver hangs while it loads the models, by chance; the whole log is {self.log_path}"
                raise ServerFailed(text, self.log_tail(), by_chance=True)
            time.sleep(_POLL_S)  # Triton does not announce that its models are loaded, so it is polled.
            said = server_log.engine_phase(server_log.tail(self.log_path))
            if said is not None and said != phase:
                phase = said
                on_phase(f"engine: {phase}")
        self._stubs = Stubs(self.pid, TritonControl(self.http_url, self.admin_key).readiness)
        self._stubs.take_in()
        self._generate_first_tokens(deadline, on_phase)
        if dead := self.dead_stubs():
            raise ServerFailed(f"stub process {dead[0].pid} died while the server started", self.log_tail())
        self._watch()
        self._tell("serving")

    def stop(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """End the server and everything it started, after a drain: running requests have the exit timeout to finish.

        With `cancelled()` true the rest of the wait is skipped. Afterwards no process and no shared memory of it is
        left.
        """
        self._stop_watching()
        if self._process is not None:
            self._known = processes_of_run(self.run_id)
        if self._process is not None and self._signs is not None and self.running():
            self._tell("stopping")
            ServerStop(
                self._process,
                self.run_id,
                self.ports.grpc,
                self._signs,
                len(self.models),
                self.log_path,
                cancelled,
            ).run(self.exit_timeout_s)
        self._sweep()

    def kill(self, spare: Sequence[int] = ()) -> None:
        """End everything at once, without draining; but for the processes `spare` that were started beside the server."""
        self._sweep(spare)

    def abandon(self) -> None:
        """End a server that has failed."""
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

    def failure(self) -> EndReason | None:
        """Why a server that was ready must be ended now; None = all is well, or wait_ready() has not returned yet."""
        if not self.running():
            return EndReason(f"tritonserver {describe_end(self.exit_status or 0)}; {log_files.where(self.log_path)}")
        if dead := self.dead_stubs():
            model = f" of model {self._signs.model_of(dead[0].pid)}" if self._signs else ""
            return EndReason(f"stub process {dead[0].pid}{model} died; {log_files.where(self.log_path)}")
        if self._monitor is not None and (found := self._monitor.failure()):
            return found
        return EndReason(too_large) if self._memory and (too_large := self._memory.too_large()) else None

    def dead_stubs(self) -> list[Process]:
        """Stubs that ought to live, and have died."""
        if self._stubs is None or self._signs is None:
            return []
        return self._stubs.dead(self._signs, is_watched=self._monitor is not None)

    def processes(self) -> list[int]:
        """Process ids of everything that belongs to this server: itself, stubs, engine, ranks."""
        return [process.pid for process in processes_of_run(self.run_id)]

    def log_tail(self) -> str:
        """The last telling lines that the server, its stubs and the engine wrote."""
        return "\n".join(server_log.telling_lines(server_log.tail(self.log_path)))

    @property
    def _shm_prefix(self) -> str:
        return f"{SHM_PREFIX}{self.run_id}_"

    def _tell(self, state: State) -> None:
        """Tell this checkout's other commands of the server (deploy/running.py)."""
        try:
            running.write(self.run_dir, state, self.http_url, self.grpc_url, self.config, self.openai_url)
        except OSError as error:  # No room on the disk. They then ask for the default address.
            log.warning("%s cannot be written: %s", running.FILE, error.strerror)

    def _start_janitor(self) -> None:
        self._janitor = launch.start_janitor(self.run_id, self._shm_prefix, self._temporary_directory)

    def _start_process(self, command: list[str], variables: dict[str, str]) -> None:
        self._process = launch.start_server(command, variables, self.log_path)
        memory.spare_children_the_stack(self.pid)

    def _watch(self) -> None:
        """Look after the server from now on, until it is stopped."""
        assert self._signs is not None, "start() has made them"
        self._memory = memory.MemoryWatch(self.pid)
        model = self.text_model.name if self.text_model else foreign.one_that_serves(self.models, self.http_url)
        self._monitor = Monitor(
            self.http_url,
            self._signs,
            self.log_path,
            Readiness(self.http_url, self.admin_key, model),
            self.dead_stubs,
            self.config.triton.watchdog_timeout_s,
            self.on_event,
            self._judge,
            lambda: foreign.forget_broken(self.models, self.http_url, self.admin_key, self.on_event),
        )
        self._monitor.start()

    def _stop_watching(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _stubs_work(self) -> bool:
        return any(cpu_demand(stub.pid).waiting for stub in stubs_of(self.pid))

    def _check_start(self, deadline: float, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        assert self._signs is not None, "start() has made them"
        self._signs.look()  # Signs of the start are old when it is over.
        if cancelled():
            raise StartCancelled
        if not self.running():
            lines = server_log.tail(self.log_path)
            if reason := server_log.reason(lines):
                raise ServerFailed(reason)
            text = f"tritonserver {describe_end(self.exit_status or 0)} while it started; the log is {self.log_path}"
            raise ServerFailed(text, self.log_tail(), by_chance=server_log.died_by_chance(lines))
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"tritonserver was not ready after {timeout_s:.0f} s; the whole log is {self.log_path}", self.log_tail()
            )

    def _generate_first_tokens(self, deadline: float, on_phase: Callable[[str], None]) -> None:
        if self.text_model is not None:
            on_phase("generating a first token")
            self._generate_first_token(self.text_model, deadline)

    def _lay_out(self, place: Path) -> list[Path]:
        """Write what the server reads besides its configuration into its directory; returns the model repositories."""
        return repositories_of(self.models, place / "models", decoupled=bool(self.config.triton.decoupled))

    def _judge(self, reports: Sequence[health.Report]) -> health.Verdict:
        """The verdict about the server, from the signs of life of its stubs."""
        return health.judge(reports)

    def _generate_first_token(self, asked: AskedModel, deadline: float) -> None:
        remaining = max(5.0, deadline - time.monotonic())
        try:
            probe.generate_one_token(self.http_url, asked, timeout_s=remaining)
        except probe.ProbeFailed as failure:
            raise ServerFailed(f"the server is up but does not generate: {failure}", self.log_tail()) from None

    def _sweep(self, spare: Sequence[int] = ()) -> None:
        """Kill and remove whatever is left, then let the janitor go (it finds nothing to do)."""
        self._stop_watching()
        left = kill_run(self.run_id, spare=spare, known=self._known)
        self._known = []
        if self._process is not None:
            self._process.wait()
            self._process = None
            running.forget(self.run_dir)
        remove_shared_memory(self._shm_prefix)
        if self._temporary_directory is not None:
            shutil.rmtree(self._temporary_directory, ignore_errors=True)
            self._temporary_directory = None
        if self._signs is not None:
            self._signs.close()
            self._signs = None
        if self._janitor is not None:
            if spare:
                self._janitor.kill()  # It would end what is spared.
            self._janitor.communicate()  # This closes its input, which is what it waits for.
            self._janitor = None
        self._stubs = None
        if left:
            raise ServerFailed(f"processes {left} of the server did not end after SIGKILL; look at them with ps")
