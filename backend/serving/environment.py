"""What a model finds around it in a Triton stub: configuration, the run directory that all models of one server
share, numpy.

    EVERBATCH_CONFIG           effective engine configuration, JSON; unset = defaults
    EVERBATCH_RUN_DIR          holds the engine's socket; unset = a 0700 directory keyed by user and server process
    EVERBATCH_RUN_DIR/health/  one file for each model, by which the launcher knows what Triton does not tell it
    EVERBATCH_EXIT_TIMEOUT_S   the server's --exit-timeout-secs; running requests may use most of it while it drains

The launcher sets them. In a plain tritonserver none is set and everything still meets: stubs are children of the
server.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from backend.api import ConfigError, EngineConfig, load_config

DEFAULT_EXIT_TIMEOUT_S = 30.0
DRAIN_SHARE = 0.6  # of the exit timeout: the rest is for finalize() and the server's own end
OWNER_START_S = 5.0  # how long a model waits for a sign of the model that owns the engine

# ready: requests are served; unavailable: they are refused, the engine is being started again; draining: the server is
# about to stop; given_up: the engine died too often and is not started again, only a new server helps
Health = Literal["ready", "unavailable", "draining", "given_up"]

NUMPY_MISMATCH = (
    "numpy {version} does not fit this tritonserver: its Python backend was built before numpy 2, and the first "
    "request would end the process; install 'numpy<2' in the environment of the Python backend, or use a server of "
    "release 25.01 or later"
)


def engine_config() -> EngineConfig:
    """Raises ConfigError naming the key that is wrong."""
    return load_config(os.environ.get("EVERBATCH_CONFIG") or None)


def drain_grace_s() -> float:
    return DRAIN_SHARE * float(os.environ.get("EVERBATCH_EXIT_TIMEOUT_S") or DEFAULT_EXIT_TIMEOUT_S)


def check_numpy(round_trip_works: Callable[[], bool]) -> None:
    """Raise ConfigError when this numpy would kill the stub at its first request.

    Triton before 25.01 carries a pybind11 that reads numpy 1's dtype layout; with numpy 2 every array it makes has
    strides of 0. No version tells a model which server runs it, so it is tried: an array handed over by DLPack comes
    back as one that Triton made (`round_trip_works`). numpy 1 fits every server and is not tried.
    """
    print(f"everbatch: Python environment {sys.prefix}, numpy {np.__version__}", flush=True)
    if int(np.__version__.split(".")[0]) >= 2 and not round_trip_works():
        raise ConfigError(NUMPY_MISMATCH.format(version=np.__version__))


class RunDirectory:
    """Where the models of one server meet: `engine.sock`, `owner.pid` of the model that starts the engine, and `health/`."""

    def __init__(self, path: Path):
        self._path = path
        self._owner = path / "owner.pid"
        self._health = path / "health"

    @classmethod
    def of_this_server(cls) -> RunDirectory:
        """Raises ConfigError when the default directory belongs to somebody else."""
        given = os.environ.get("EVERBATCH_RUN_DIR")
        path = Path(given or Path(tempfile.gettempdir(), f"everbatch-{os.getuid()}-{os.getppid()}"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or (not given and status.st_mode & 0o077):
            raise ConfigError(
                f"run directory {path.name}: it is not private to this user; set EVERBATCH_RUN_DIR to one that is"
            )
        return cls(path)

    @property
    def socket_path(self) -> str:
        return str(self._path / "engine.sock")

    def claim(self) -> None:
        """Say that this process is about to start the engine."""
        self._owner.write_text(str(os.getpid()))

    def disclaim(self) -> None:
        self._owner.unlink(missing_ok=True)

    def report_health(self, model: str, state: Health) -> None:
        """Leave a sign of life of this stub: {"state", "pid", "at_ns"}, the time by CLOCK_MONOTONIC. Replaced as a whole."""
        self._health.mkdir(mode=0o700, exist_ok=True)
        fresh = self._health / f".{model}.new"
        fresh.write_text(json.dumps({"state": state, "pid": os.getpid(), "at_ns": time.monotonic_ns()}))
        fresh.replace(self._health / model)

    def has_owner(self) -> bool:
        """Whether a living process of this user has claimed the engine."""
        try:
            os.kill(int(self._owner.read_text()), 0)
        except (
            FileNotFoundError,
            ValueError,
            ProcessLookupError,
            PermissionError,
        ):  # the last: a number given out anew
            return False
        return True

    def wait_for_engine(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait while the owner starts the engine; returns whether it is ready.

        Triton loads only a few models at a time. If the owner is not among them it cannot start before this model has
        loaded, so without a sign of it the wait is short.
        """
        started = time.monotonic()
        while not is_ready():
            waited = time.monotonic() - started
            if waited > timeout_s or (waited > OWNER_START_S and not self.has_owner()):
                return False
            time.sleep(0.02)
        return True
