"""The private directory of one running server.

.run/NAME/            0700
    config.json       the effective configuration, as the engine reads it
    backends/python/  links into the wheel
    models/           a rendered copy of the model repository, only where a setting changes it
    server.log        what the server, its stubs and the engine write; server.log.1 to .9 are older ones
    health/           signs of life of the stubs; beside the socket, wherever that is
    admin.key         secret of the restricted APIs, 0600
    engine.sock       the engine's socket, unless this path is too long for one
"""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
import tempfile
from pathlib import Path

import msgspec

from backend.api.config import EngineConfig
from deploy import IS_CHECKOUT, ROOT
from deploy.errors import UserError

MAX_SOCKET_PATH = 100  # bytes: sun_path holds 108 with the closing zero, and ranks append a suffix
_DECOUPLED = re.compile(r"\bdecoupled\s*:\s*(?:true|false)", re.IGNORECASE)


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
    """Make it, readable by nobody else. Raises UserError when it cannot be written."""
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


def socket_directory(directory: Path) -> tuple[Path, bool]:
    """Where engine.sock may lie, and whether that is a temporary directory made for it (the caller removes it)."""
    if len(os.fsencode(directory / "engine.sock")) <= MAX_SOCKET_PATH:
        for stale in (directory / "engine.sock", directory / "owner.pid"):  # An engine that was killed has left them.
            stale.unlink(missing_ok=True)
        return directory, False
    return Path(tempfile.mkdtemp(prefix="everbatch-")), True


def render_repository(source: Path, directory: Path, *, decoupled: bool) -> Path:
    """The repository to serve: `source` itself, or for unary clients a copy under `directory` that is not decoupled.

    Only config.pbtxt files are rewritten; version directories (1/, 2/ ...) and other files are links to the source.
    """
    if decoupled:
        return source
    if directory.exists():
        shutil.rmtree(directory)
    for model in sorted(path for path in source.iterdir() if (path / "config.pbtxt").is_file()):
        copy = directory / model.name
        copy.mkdir(parents=True)
        for entry in model.iterdir():
            if entry.name != "config.pbtxt":
                (copy / entry.name).symlink_to(entry.resolve())
        (copy / "config.pbtxt").write_text(set_decoupled((model / "config.pbtxt").read_text(), decoupled))
    return directory


def compile_models(source: Path) -> None:
    """Write the bytecode of every model.py beside it. Else the first import of a stub does, Triton takes the changed directory
    for a changed model as soon as it is asked to load anything, and unloads a model that is serving.
    """
    for path in sorted(source.glob("*/*/model.py")):
        try:
            py_compile.compile(str(path), quiet=2)
        except OSError:  # The directory is not ours to write, so no stub writes to it either.
            continue


def set_decoupled(pbtxt: str, decoupled: bool) -> str:
    """A model configuration with its transaction policy changed; one without a policy stays as it is (not
    decoupled).
    """
    return _DECOUPLED.sub(f"decoupled: {str(decoupled).lower()}", pbtxt)


def check_repository(source: Path) -> Path:
    """The absolute path of a repository with at least one model. Raises UserError."""
    if not source.is_dir():
        raise UserError(f"model repository {source} is no directory; give one with --model-repository DIR")
    if not any(source.glob("*/config.pbtxt")):
        raise UserError(
            f"model repository {source} holds no model (no */config.pbtxt); give another with --model-repository DIR"
        )
    return source.resolve()
