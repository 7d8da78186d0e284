"""The private directory of one running server.

.run/NAME/            0700
    config.json       the effective configuration, as the engine reads it
    backends/         Triton's Python backend (links into the wheel), and those of this project
    models/           the model repository, where it is put together or a setting changes it (deploy/repository.py)
    server.log        what the server, its stubs and the engine write; server.log.1 to .9 are older ones
    gateway.log       what the OpenAI endpoint writes; gateway.log.1 to .9 are older ones
    health.pipe       takes the signs of life of the stubs (deploy/signs.py)
    admin.key         secret of the restricted APIs, 0600
    server.json       where the server is and whether it starts, serves or stops (deploy/running.py)
    engine.sock       the engine's socket

Where this path is too long for a socket, or holds a blank or another character that Triton does not take, backends, models,
health.pipe and engine.sock lie in a temporary directory.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import msgspec

from backend.api.config.schema import EngineConfig
from deploy import IS_CHECKOUT, ROOT
from deploy.errors import UserError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=,./-]+")
MAX_SOCKET_PATH = 100  # bytes: sun_path holds 108 with the closing zero, and ranks append a suffix


def default_run_directory(name: str) -> Path:
    """NAME in EVERBATCH_RUN_ROOT where that is set (the container), else in .run of the checkout; where pip installed
    Everbatch, in the user's directory for states.
    """
    if chosen := os.environ.get("EVERBATCH_RUN_ROOT"):
        return Path(chosen) / name
    if IS_CHECKOUT:
        return ROOT / ".run" / name
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "everbatch" / name


def prepare_run_directory(directory: Path) -> Path:
    """Make the directory, readable by this user alone. Raises UserError when it cannot be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"the run directory {directory} cannot be used ({error.strerror}); set EVERBATCH_RUN_ROOT to a writable one"
        ) from None
    return directory


def write_private(path: Path, text: str) -> Path:
    """Write a file that only this user can read, replacing an older one."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


def write_config(directory: Path, config: EngineConfig) -> Path:
    """Store the effective configuration as JSON; load_config() of the same file gives an equal value."""
    text = json.dumps(msgspec.to_builtins(config), indent=2)
    return write_private(directory / "config.json", text + "\n")


def plain_directory(directory: Path) -> tuple[Path, bool]:
    """Where the socket, the pipe of the signs of life and what Triton reads may lie: the run directory itself, or a temporary one
    made for it (the caller removes it). Returns it, and whether it is temporary.

    A socket's path must be short. Triton starts its stubs by a line for a shell, in which a blank ends a path, and it finds no
    model below a name that is not ASCII.
    """
    if len(os.fsencode(directory / "engine.sock")) <= MAX_SOCKET_PATH and is_plain(directory):
        for stale in (directory / "engine.sock", directory / "owner.pid"):  # An engine that was killed has left them.
            stale.unlink(missing_ok=True)
        return directory, False
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="everbatch-", dir=parent if is_plain(Path(parent)) else "/tmp")), True


def plain_way(directory: Path, place: Path) -> Path:
    """A path to a directory that Triton takes: its own, or that of a link in `place`, which is made anew."""
    if is_plain(directory):
        return directory
    link = place / "code"
    link.unlink(missing_ok=True)
    link.symlink_to(directory)
    return link


def is_plain(path: Path) -> bool:
    """True if a shell and Triton take the path as it is."""
    return _PLAIN.fullmatch(str(path)) is not None
