"""The OpenAI-compatible endpoint beside a TritonServer: `python -m gateway` as a child of the launcher.

It is started with the server, started again by itself when it ends, and told to end when the server is. While a server that has
failed is started again it stays: it tells its clients why their replies ended, and refuses new ones with 503. It carries the
server's run id, so whatever ends the processes of that run (the sweep of stop(), the janitor) ends it too. Its end is no
failure of the server: models and their clients go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import Struct
from msgspec import json as msgspec_json

from backend.api.processes.back_off import BackOff
from deploy import ROOT, __version__, log_files, probe
from deploy.errors import EndReason, ServerFailed, StartCancelled, UserError
from deploy.ports import check_port, reachable, url_host
from deploy.processes import RUN_ID_VARIABLE, describe_end
from deploy.triton_server import TritonServer

START_S = 60.0  # it imports a web server and opens a port
LAST_WORDS_S = 1.0
AUTO = "auto"
LONGEST_NAME = 256  # characters of `model` in a request
_POLL_S = 0.1
PROGRAM = (sys.executable, "-P", "-m", "gateway")

log = logging.getLogger("everbatch.gateway")


class EndpointModel(Struct, frozen=True):
    """A further model, as the endpoint reads it (gateway/served.py)."""

    triton_model: str
    names: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    label: str = ""
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    prompt_adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class GatewayOptions:
    """`names`: model names that clients may send as `model`, in the order of /v1/models. `adapters` (LoRA) and
    `prompt_adapters`: names of such that clients may send there, too. `others`: further models of the server. `metrics_label`:
    what the metrics of the first one's engine call it, where there are several. `api_keys`: the file of keys; None: no key is
    needed. `tool_format` and `reasoning_format`: how the model writes tool calls and marks its reasoning; AUTO: as its
    chat template shows. `allow_origins`, `allow_hosts`: see gateway/browsers.py. `allow_image_hosts`: gateway/image_hosts.py.
    """

    port: int
    host: str = "127.0.0.1"
    api_keys: Path | None = None
    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    metrics_label: str = ""
    others: tuple[EndpointModel, ...] = ()
    prompt_adapters: tuple[str, ...] = ()
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_image_hosts: tuple[str, ...] = ()
    batches: Path | None = None  # the directory of files and batches; None: there are none

    def check(self, taken: tuple[int, ...]) -> None:
        """Raise UserError when it could not listen, or lacks what it needs. `taken`: ports that the server is to have."""
        if not 1 <= self.port <= 65535:
            raise UserError(f"--openai-port is {self.port}, allowed is 1 to 65535, or 0 for no OpenAI endpoint")
        if self.port in taken:
            raise UserError(f"port {self.port} is given twice; choose another one with --openai-port PORT")
        for name in self.names:
            if not name or len(name) > LONGEST_NAME:
                raise UserError(f"--served-model-name {name[:40]!r}: a name has 1 to {LONGEST_NAME} characters")
        for name in self.adapters:
            if name in self.names:
                raise UserError(f"--lora {name}=...: clients know the model by this name; choose another one")
        if same := set(self.prompt_adapters) & set(self.names):
            raise UserError(f"prompt adapter {min(same)}: clients know the model by this name; choose another one")
        check_port(self.host, self.port, "--openai-port")
        if self.api_keys is not None and not self.api_keys.is_file():
            raise UserError(f"--api-keys {self.api_keys} is no file; it holds lines of NAME KEY")
        if PROGRAM[-1] == "gateway" and importlib.util.find_spec("gateway") is None:
            raise UserError(
                "the package of the OpenAI endpoint is not installed; give --openai-port 0 to serve without"
            )
        self._check_keys()
        self._check_formats()
        self._check_browsers()
        self._check_image_hosts()

    def with_formats_of(self, template: str) -> GatewayOptions:
        """These options with the formats that a chat template shows, where none are given."""
        from gateway.detected import formats_of  # here, because the server can do without the package

        found = formats_of(template)
        tools = found.tools if self.tool_format == AUTO else self.tool_format
        reasoning = found.reasoning if self.reasoning_format == AUTO else self.reasoning_format
        return replace(self, tool_format=tools, reasoning_format=reasoning)

    def _check_formats(self) -> None:
        """Raise UserError for a name that stands for no format."""
        if self.tool_format == self.reasoning_format == AUTO:
            return
        from gateway.detected import REASONING_FORMATS, TOOL_FORMATS

        for flag, name, known in (
            ("--tool-format", self.tool_format, TOOL_FORMATS),
            ("--reasoning-format", self.reasoning_format, REASONING_FORMATS),
        ):
            if name not in (AUTO, *known):
                raise UserError(f"{flag} {name[:40]!r} is not known; allowed are {AUTO}, {', '.join(known)}")

    def _check_browsers(self) -> None:
        """Raise UserError for an origin or a name that is none."""
        if self.allow_origins or self.allow_hosts:
            from gateway.browsers import fault_of  # here, because the server can do without the package

            if (fault := fault_of(self.allow_origins, self.allow_hosts, self.api_keys is not None)) is not None:
                raise UserError(fault)

    def _check_image_hosts(self) -> None:
        """Raise UserError for a host that is none."""
        if self.allow_image_hosts:
            from gateway.image_hosts import fault_of_hosts, split  # here, because the server can do without the package

            if (fault := fault_of_hosts(split(self.allow_image_hosts))) is not None:
                raise UserError(fault)

    def _check_keys(self) -> None:
        """Raise UserError for a file of keys that the endpoint would not start with."""
        if self.api_keys is None:
            return
        from gateway.keys import KeysError, read_keys  # here, because the server can do without the package

        others = [name for each in self.others for name in (*each.names, *each.adapters, *each.prompt_adapters)]
        try:
            read_keys(self.api_keys, (*self.names, *self.adapters, *self.prompt_adapters, *others))
        except KeysError as error:
            raise UserError(f"--api-keys {self.api_keys}: {error}") from None


class ServerWithGateway:
    """A server and its endpoint as one, for the supervisor. One thread."""

    def __init__(self, server: TritonServer, options: GatewayOptions, program: tuple[str, ...] = PROGRAM) -> None:
        self.server = server
        self.options = options
        self.log_path = server.log_path.with_name("gateway.log")
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._back_off = BackOff(None)  # It is never given up: the server is of use without it.
        self._started_at = 0.0
        self._start_again_at: float | None = None
        self._log_trouble: str | None = None
        server.openai_url = self.url

    @property
    def url(self) -> str:
        return f"http://{url_host(reachable(self.options.host))}:{self.options.port}"

    # ---- what the supervisor asks for ----------------------------------------------------------------------------------

    def start(self) -> None:
        runs = self._process is not None and self._status() is None  # It has outlived the server's last life.
        if not runs:
            check_port(self.options.host, self.options.port, "--openai-port")
        self.server.start()
        if not runs:
            self._spawn()  # It says that it is not ready until the models are, which take longer than it does.

    def wait_ready(
        self, timeout_s: float, *, on_phase: Callable[[str], None], cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until the server generates and the endpoint answers. Raises ServerFailed, StartCancelled."""
        self.server.wait_ready(timeout_s, on_phase=on_phase, cancelled=cancelled)
        on_phase("starting the OpenAI endpoint")
        deadline = time.monotonic() + START_S
        while not self._answers():
            if cancelled():
                raise StartCancelled
            if (status := self._status()) is not None:
                raise ServerFailed(f"the OpenAI endpoint {describe_end(status)}; {self._where()}", self._last_words())
            if time.monotonic() > deadline:
                raise ServerFailed(f"the OpenAI endpoint did not answer within {START_S:.0f} s; {self._where()}")
            time.sleep(_POLL_S)  # The endpoint does not announce that its port is open, so it is polled.

    def failure(self) -> EndReason | None:
        """Why the server must be ended; None = all is well. Looks after the endpoint besides."""
        failure = self.server.failure()
        if failure is None:
            self._look_after()
        return failure

    def stop(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Drain endpoint and server at the same time: the endpoint's replies come from the server's."""
        if self._process is not None and self._status() is None:
            self._process.terminate()
        self.server.stop(cancelled=cancelled)
        self._reap()

    def abandon(self) -> None:
        """End a server that has failed, but not the endpoint: its replies end with an error that their clients get."""
        self.server.kill(spare=() if self._process is None else (self._process.pid,))

    def kill(self) -> None:
        """End everything at once; an endpoint that has outlived its server gets a moment for the last words to its clients."""
        if self._process is not None and not self.server.running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_S)
        self.server.kill()
        self._reap()

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        spawn = [sys.executable, "-P", "-m", "deploy.spawn", str(os.getpid()), "0"]
        options = {
            "--triton": self.server.grpc_url,
            "--host": self.options.host,
            "--port": str(self.options.port),
            "--server-version": __version__,
            "--metrics-url": self.server.metrics_url,
            "--shutdown-grace-s": str(self.server.exit_timeout_s),
        }
        formats = {"--tool-format": self.options.tool_format, "--reasoning-format": self.options.reasoning_format}
        options |= {flag: name for flag, name in formats.items() if name != AUTO}
        if self.options.api_keys is not None:
            options["--api-keys"] = str(self.options.api_keys.resolve())
        if self.options.batches is not None:
            options["--batches"] = str(self.options.batches.resolve())
        named = [word for name in self.options.names for word in ("--model-name", name)]
        named += [word for name in self.options.adapters for word in ("--lora", name)]
        named += [f"--allow-origin={origin}" for origin in self.options.allow_origins]
        named += [f"--allow-host={name}" for name in self.options.allow_hosts]
        named += [f"--allow-image-hosts={hosts}" for hosts in self.options.allow_image_hosts]
        named += [
            word for each in self.options.others for word in ("--other-model", msgspec_json.encode(each).decode())
        ]
        if self.options.metrics_label:
            options["--metrics-label"] = self.options.metrics_label
        if self.server.control_path is not None:
            options["--control"] = str(self.server.control_path)
        named += [word for name in self.options.prompt_adapters for word in ("--prompt-adapter", name)]
        return [*spawn, *self._program, *(word for pair in options.items() for word in pair), *named]

    def _spawn(self) -> None:
        with log_files.begin(self.log_path) as file:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone.
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT),
                    RUN_ID_VARIABLE: self.server.run_id,
                    "EVERBATCH_LOG_FORMAT": self.server.log_format,
                },
            )
        self._start_again_at, self._started_at = None, time.monotonic()

    def _look_after(self) -> None:
        """Start the endpoint again some time after it has ended; the delay grows while it ends again and again."""
        self._look_after_log()
        status, now = self._status(), time.monotonic()
        if status is None:
            return
        if self._start_again_at is None:
            delay = self._back_off.delay_after_end(now, now - self._started_at)
            assert delay is not None
            self._start_again_at = now + delay
            self.server.on_event(
                f"the OpenAI endpoint {describe_end(status)}; starting it again in {delay:g} s; {self._where()}"
            )
        elif now >= self._start_again_at:
            self._spawn()

    def _look_after_log(self) -> None:
        trouble = log_files.look_after(self.log_path)
        if trouble is not None and self._log_trouble is None:
            self.server.on_event(trouble)
        self._log_trouble = trouble

    def _status(self) -> int | None:
        """The exit status of the endpoint's process; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def _answers(self) -> bool:
        try:
            return probe.request(self.url, "GET", "/health", timeout_s=5.0)[0] == 200
        except probe.ProbeFailed:
            return False

    def _reap(self) -> None:
        """Wait for the end of the process, which stop() or kill() of the server has ended with the others of its run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._start_again_at = None

    def _where(self) -> str:
        return log_files.where(self.log_path)

    def _last_words(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-5:])
