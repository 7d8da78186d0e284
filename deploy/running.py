"""Which servers run now that this checkout (or installed copy) has started: RUN_DIR/server.json tells where each is.

The file names the process that wrote it, so one that was left behind by a launcher that was killed is not believed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from msgspec import DecodeError, Struct, ValidationError
from msgspec import json as msgspec_json

from backend.api.checkpoint.gguf_parts import model_name, title
from backend.api.config.schema import EngineConfig
from client.located import Located
from deploy.model_source import DEFAULT_MODEL
from deploy.processes import Process, read_stat
from deploy.rundir import default_run_directory, write_private

FILE = "server.json"
COMMAND = "serve"  # the first word of the run directories of `everbatch serve`; tests and benchmarks have others
State = Literal["starting", "serving", "stopping"]


class RunningServer(Struct, frozen=True):
    """The launcher's record of its server. `model` is the name of the checkpoint."""

    pid: int
    start: int
    state: State
    http_url: str
    grpc_url: str
    model: str
    openai_url: str = ""

    def located(self, others: tuple[Located, ...] = ()) -> Located:
        return Located(self.grpc_url, self.http_url, self.model, self.state, others, self.openai_url)


def write(
    directory: Path, state: State, http_url: str, grpc_url: str, config: EngineConfig, openai_url: str = ""
) -> None:
    """Tell of a server of this process. It stays told until forget(), or until this process ends."""
    path = Path(config.model.path or DEFAULT_MODEL)
    name = "the small model" if path == DEFAULT_MODEL else title(model_name(path.name))
    stat = read_stat(os.getpid())
    assert stat is not None, "this process runs"
    running = RunningServer(os.getpid(), stat.start, state, http_url, grpc_url, name, openai_url)
    write_private(directory / FILE, msgspec_json.encode(running).decode() + "\n")


def forget(directory: Path) -> None:
    """The server has ended."""
    (directory / FILE).unlink(missing_ok=True)


def running(parent: Path | None = None) -> list[RunningServer]:
    """The servers that run now, the latest one first. `parent`: of the run directories."""
    try:
        parent = default_run_directory(COMMAND).parent if parent is None else parent
    except RuntimeError:  # This user has no home directory, and so no server's run directory in it.
        return []
    files = sorted(parent.glob(f"{COMMAND}-*/{FILE}"), key=_changed_at, reverse=True)
    return [found for path in files if (found := _read(path)) is not None]


def locate() -> Located | None:
    """The server that a command without --url is meant for: the latest one of this checkout that serves, else one that starts
    or stops.
    """
    found = sorted(running(), key=lambda each: each.state != "serving")
    return found[0].located(tuple(each.located() for each in found[1:])) if found else None


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # It has just been removed.
        return 0.0


def _read(path: Path) -> RunningServer | None:
    try:
        found = msgspec_json.decode(path.read_bytes(), type=RunningServer)
    except (OSError, DecodeError, ValidationError):  # It has just been removed, or another version wrote it.
        return None
    return found if Process(found.pid, found.start).alive() else None
