"""The environment of a model in a Triton stub: its configuration, the run directory of its server, and numpy.

    EVERBATCH_CONFIG           the whole engine configuration as JSON; the defaults apply when it is not set
    EVERBATCH_RUN_DIR          the directory of the engine's socket; when it is not set, a directory with mode 0700 whose
                               name holds the user id and the server's process id
    EVERBATCH_RUN_DIR/health.pipe   the pipe through which the launcher reads the state of each model, if there is a launcher
    EVERBATCH_RUN_DIR/eN       the same for engine N of a server with several models: config.json and the engine's socket; the
                               parameter `engine` of a model's config.pbtxt names it
    EVERBATCH_EXIT_TIMEOUT_S   how many seconds running requests may go on once the server drains

The launcher sets these variables. A plain tritonserver sets none of them, and its models still find the same directory,
because all stubs are children of one server process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from backend.api import ConfigError, EngineConfig, load_config
from backend.api.config.multi_model import FILE

DEFAULT_DRAIN_S = 25.0  # under a plain tritonserver, whose own --exit-timeout-secs is 30 unless it is changed
_ENGINE = re.compile("e[0-9]{1,6}")
OWNER_START_S = 5.0  # how long a model waits for a sign of the model that owns the engine

# ready: requests are served. unavailable: requests are refused for now (the engine does not answer, the tokenizer is not
# loaded, or all text threads are stuck). draining: the server is about to stop. given_up: the engine died too often and is
# not started again, so only a new server helps. unloaded: Triton was asked to unload the model, and its stub ends.
Health = Literal["ready", "unavailable", "draining", "given_up", "unloaded"]

NUMPY_MISMATCH = (
    "numpy {version} does not fit this tritonserver: its Python backend was built before numpy 2, and the first "
    "request would end the process; install 'numpy<2' in the environment of the Python backend, or use a server of "
    "release 25.01 or later"
)


def engine_config(run_directory: RunDirectory) -> EngineConfig:
    """The configuration of the engine of a directory of its own, else the one in EVERBATCH_CONFIG. Raises ConfigError that names
    the wrong key.
    """
    return load_config(run_directory.config_file or os.environ.get("EVERBATCH_CONFIG") or None)


def drain_grace_s() -> float:
    """Seconds for which running requests may go on once the server drains."""
    return float(os.environ.get("EVERBATCH_EXIT_TIMEOUT_S") or DEFAULT_DRAIN_S)


def local_path(path: str) -> str:
    """A path that this interpreter can open: in a stub it decodes paths as ASCII, whatever the environment says."""
    return os.fsdecode(path.encode("utf-8", "surrogateescape"))


def check_numpy(round_trip_works: Callable[[], bool]) -> None:
    """Raise ConfigError when this numpy would kill the stub at its first request.

    Triton before 25.01 was built with a pybind11 that reads numpy 1's dtype layout. With numpy 2, each array that it makes
    has strides of 0. A model cannot ask for the server's version, so `round_trip_works` tries it: an array that is handed
    over by DLPack comes back as one that Triton made. numpy 1 works with every server and is not tried.
    """
    print(f"everbatch: Python environment {sys.prefix}, numpy {np.__version__}", flush=True)
    if int(np.__version__.split(".")[0]) >= 2 and not round_trip_works():
        raise ConfigError(NUMPY_MISMATCH.format(version=np.__version__))


class RunDirectory:
    """The directory that all models of one server share.

    It holds the engine's socket `engine.sock`, the process of the engine's owner in `owner.pid`, and `health.pipe`.
    """

    def __init__(self, path: Path, engine: str = "") -> None:
        """`engine`: the name of the engine's own directory within it, where a server has several."""
        self._engine = engine
        self._health = path / "health.pipe"
        self._path = path / engine
        self._owner = self._path / "owner.pid"

    @classmethod
    def of_this_server(cls, engine: str = "") -> RunDirectory:
        """Find the directory, or make it.

        Raises ConfigError when it is not a directory of this user, when others may use the default one, or when `engine` is no
        name of an engine's directory.
        """
        if engine and _ENGINE.fullmatch(engine) is None:
            raise ConfigError(f"engine of config.pbtxt is {engine[:40]!r}; it is e and a number of up to 6 digits")
        given = os.environ.get("EVERBATCH_RUN_DIR")
        path = Path(given or Path(tempfile.gettempdir(), f"everbatch-{os.getuid()}-{os.getppid()}"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or (not given and status.st_mode & 0o077):
            raise ConfigError(
                f"run directory {path.name}: it is not private to this user; set EVERBATCH_RUN_DIR to one that is"
            )
        return cls(path, engine)

    @property
    def config_file(self) -> Path | None:
        """The configuration of the engine that has a directory of its own."""
        return self._path / "config.json" if self._engine else None

    @property
    def away_file(self) -> Path | None:
        """The file that says that this engine is away on purpose (absence.py); None: no launcher writes one."""
        return self._path / FILE if self._engine else None

    def reading_file(self, model: str) -> Path:
        """The file in which a stub notes whose texts it reads (suspects.py)."""
        return self._path / f"reading.{hashlib.sha256(model.encode()).hexdigest()[:16]}"

    @property
    def socket_path(self) -> str:
        return str(self._path / "engine.sock")

    def claim(self, model: str) -> bool:
        """Record that this process is about to start the engine for `model`. False, and nothing is recorded, when a living
        process has claimed it for another model; a model that is loaded anew takes over from itself.
        """
        with (self._path / "owner.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.has_owner() and self._claimed_for_another(model):
                return False
            self._owner.write_text(f"{os.getpid()} {_start_of(os.getpid())} {model}")
            return True

    def _claimed_for_another(self, model: str) -> bool:
        pid, start, claimed_for = self._owner.read_text().split(maxsplit=2)
        return (
            claimed_for != model and _start_of(int(pid)) == start
        )  # Else a later process has got the claimant's number.

    def disclaim(self) -> None:
        """Take the claim back, because this process could not start the engine."""
        self._owner.unlink(missing_ok=True)

    def report_health(self, model: str, state: Health, num_live: int, why: str = "") -> None:
        """Report this stub's state, its reason and the number of open requests to the launcher (deploy/signs.py). Never blocks.

        A plain tritonserver has no reader for it. A launcher that was suspended reads later signs.
        """
        sign = {"model": model, "state": state, "pid": os.getpid(), "live": num_live, "why": why}
        try:
            pipe = os.open(self._health, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # there is no pipe, or no reader
                return
            raise
        try:
            os.write(pipe, json.dumps(sign).encode() + b"\n")
        except (BlockingIOError, BrokenPipeError):  # The pipe is full, or its reader has just gone.
            pass
        finally:
            os.close(pipe)

    def has_owner(self) -> bool:
        """True if a living process of this user has claimed the engine."""
        try:
            os.kill(int(self._owner.read_text().split()[0]), 0)
        except (FileNotFoundError, ValueError, IndexError, ProcessLookupError, PermissionError):
            # PermissionError means that the claimant has ended and another user's process has got its number.
            return False
        return True

    def wait_for_engine(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds while the owner starts the engine; return whether the engine is ready.

        Triton loads only a few models at a time. An owner that is not among them can only start once this model has loaded,
        so the wait is short while the engine has no owner.
        """
        started = time.monotonic()
        while not is_ready():
            waited = time.monotonic() - started
            if waited > timeout_s or (waited > OWNER_START_S and not self.has_owner()):
                return False
            time.sleep(0.02)  # Polled, because no single event covers both the engine's answer and its owner's death.
        return True


def _start_of(pid: int) -> str:
    """When the process was started, in clock ticks after the machine's start; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):  # It has ended, which "" says.
        return ""
