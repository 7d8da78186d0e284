"""Which tritonserver, with which flags and which environment. Nothing here starts a process.

Three facts shape it. The stub finds its Python through PATH and not through PYTHONPATH. The stub must embed the libpython of that
Python. Triton listens on all interfaces and opens all of its APIs by default, so addresses are given explicitly and the dangerous
APIs ask for a secret.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.api.config.schema import EngineConfig
from backend.api.config.telemetry import otlp_settings
from deploy import IS_CHECKOUT, ROOT, libpython, secret_flags
from deploy.errors import UserError
from deploy.ports import Ports
from deploy.processes import RUN_ID_VARIABLE
from deploy.repository import BACKENDS, own_backends

MODEL_LOAD_THREADS = (
    16  # at least: all models load together, else those that wait for the engine keep its owner from loading
)
REPOSITORY_API = "model-repository"
TRACE_HEADERS = "(traceparent|tracestate)"
RESTRICTED_APIS = f"{REPOSITORY_API},shared-memory,logging,trace"
ADMIN_HEADER = "x-everbatch-admin"
INSTALL_SERVER = "pip install --no-deps nvidia-pytriton==0.7.0"  # the pin of requirements/server.txt
SECRET_FLAGS = {  # name of the variable that holds the flag -> the flag without the key; see deploy/secret_flags.py
    "EVERBATCH_HTTP_RESTRICTION": f"--http-restricted-api={RESTRICTED_APIS}:{ADMIN_HEADER}=",
    "EVERBATCH_GRPC_RESTRICTION": f"--grpc-restricted-protocol={RESTRICTED_APIS}:{ADMIN_HEADER}=",
}


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary; `wheel` is the package's directory when it comes from nvidia-pytriton, else None."""

    binary: Path
    wheel: Path | None = None

    @property
    def origin(self) -> str:
        return "the nvidia-pytriton wheel" if self.wheel else str(self.binary)


def find_installation() -> Installation:
    """PATH first, then /opt/tritonserver, then the wheel of this environment. Raises UserError when there is none."""
    on_path = shutil.which("tritonserver")
    for candidate in (on_path, "/opt/tritonserver/bin/tritonserver"):
        if candidate and os.access(candidate, os.X_OK):
            return Installation(Path(candidate).resolve())
    spec = importlib.util.find_spec("pytriton")
    for location in spec.submodule_search_locations or () if spec else ():
        wheel = Path(location) / "tritonserver"
        if (wheel / "bin" / "tritonserver").is_file():
            return Installation(wheel / "bin" / "tritonserver", wheel)
    remedy = (
        "run ./everbatch serve, which installs it into its own environment" if IS_CHECKOUT else f"run {INSTALL_SERVER}"
    )
    raise UserError(f"no tritonserver on PATH, under /opt/tritonserver or in this Python's packages; {remedy}")


def prepare_backend_directory(installation: Installation, directory: Path) -> Path | None:
    """Lay out `directory`: python/ from the wheel, and a link to each python-based backend of this project. Returns None where
    the server brings its own backends (deploy/Dockerfile adds those of this project to them).

    The library is a copy: Triton refuses python-based backends when the path of python/libtriton_python.so, its links
    followed, leads out of this directory.

    Raises UserError when the wheel has no stub for this Python, or the stub's libpython is missing.
    """
    if installation.wheel is None:
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = installation.wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise UserError(f"this tritonserver has no stub for Python {version}; use Python 3.11 or 3.12")
    if libpython.find() is None:
        raise UserError(f"{libpython.library_name()} is missing; run: apt-get install -y libpython{version}")
    if directory.exists():
        shutil.rmtree(directory)
    (directory / "python").mkdir(parents=True)
    wheel_backend = installation.wheel / "backends" / "python"
    shutil.copyfile(wheel_backend / "libtriton_python.so", directory / "python" / "libtriton_python.so")
    for target in (wheel_backend / "triton_python_backend_utils.py", stub):
        (directory / "python" / target.name).symlink_to(target)
    for name in own_backends():
        (directory / name).symlink_to(BACKENDS / name)
    return directory


def command_line(
    installation: Installation,
    *,
    repositories: Sequence[Path],
    backend_directory: Path | None,
    host: str,
    ports: Ports,
    shm_prefix: str,
    exit_timeout_s: int,
    complete: bool = True,
    num_models: int = 0,
    exits_on_error: bool = True,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """The server's command, with marks where the flags with the admin key go (environment() has their text). The key
    guards loading code, shared memory, logging and tracing. `complete`: no model's configuration is left for its backend
    to complete; then no model.py is imported twice. `exits_on_error`: a model that cannot be loaded ends the server.
    """
    command = [str(installation.binary)]
    if backend_directory is not None:
        command.append(f"--backend-directory={backend_directory}")
    return command + [
        *(f"--model-repository={repository}" for repository in repositories),
        *([] if exits_on_error else ["--exit-on-error=false"]),
        *(["--disable-auto-complete-config"] if complete else []),
        f"--model-load-thread-count={max(MODEL_LOAD_THREADS, num_models)}",
        f"--exit-timeout-secs={exit_timeout_s}",
        f"--http-address={host}",
        f"--grpc-address={host}",
        f"--metrics-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--model-control-mode=explicit",  # the launcher switches readiness by it (deploy/readiness.py)
        "--load-model=*",
        *(secret_flags.mark(name) for name in SECRET_FLAGS),
        *extra,
    ]


def tracing_flags(config: EngineConfig, extra_environment: dict[str, str]) -> tuple[str, ...]:
    """Where requests are traced: headers that say to which trace a request belongs reach the models as parameters."""
    if otlp_settings(config.telemetry, {**os.environ, **extra_environment}) is None:
        return ()
    return tuple(f"--{wire}-header-forward-pattern={TRACE_HEADERS}" for wire in ("grpc", "http"))


def environment(
    installation: Installation,
    *,
    config_file: Path,
    socket_directory: Path,
    code: Path,
    run_id: str,
    admin_key: str,
    open_repository: bool = False,
    exit_timeout_s: int,
    log_format: str = "text",
    base: dict[str, str] | None = None,
) -> dict[str, str]:
    """The server's environment, inherited by its stubs and by the engine process. `code`: where the stubs find this project.
    `open_repository`: the model repository API (index, load, unload) asks for no key.
    `base` is this process's when unset.
    """
    variables = dict(os.environ if base is None else base)
    python = Path(sys.executable)
    variables["PATH"] = _prepend(str(python.parent), variables.get("PATH", os.defpath))
    # The engine process needs it. Stubs ignore it.
    variables["PYTHONPATH"] = _prepend(str(ROOT), variables.get("PYTHONPATH", ""))
    if installation.wheel is not None:
        # The copy of the backend's library does not find the wheel's other ones by its own path. Their names are unique.
        libraries = installation.wheel.parents[1] / "nvidia_pytriton.libs"
        for directory in (str(libraries), *libpython.search_path()):
            variables["LD_LIBRARY_PATH"] = _prepend(directory, variables.get("LD_LIBRARY_PATH", ""))
    variables[RUN_ID_VARIABLE] = run_id
    variables |= {
        name: (flag.replace(f"{REPOSITORY_API},", "") if open_repository else flag) + admin_key
        for name, flag in SECRET_FLAGS.items()
    }
    variables["EVERBATCH_CONFIG"] = str(config_file)
    variables["EVERBATCH_RUN_DIR"] = str(socket_directory)
    variables["EVERBATCH_BACKEND_PATH"] = str(code)
    variables["EVERBATCH_PYTHON"] = str(python)
    variables["EVERBATCH_EXIT_TIMEOUT_S"] = str(exit_timeout_s)
    variables["EVERBATCH_LOG_FORMAT"] = log_format
    return variables


def _prepend(first: str, rest: str) -> str:
    parts = [part for part in rest.split(os.pathsep) if part and part != first]
    return os.pathsep.join([first, *parts])
