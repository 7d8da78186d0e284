"""The project's own environment, made on first use. Standard library only, and any Python >= 3.9 runs it.

.venv is usable when .venv/everbatch.json names the hash of the present requirements. While pip works, .venv/incomplete
exists: an environment that was interrupted is completed by running pip again, one whose Python does not run is made
anew. Order of side effects: lock, look for a Python, install missing system packages (root on Debian only), venv, pip,
stamp. Where .venv is a link, checkouts share the environment that it leads to, and so they share its lock.

EVERBATCH_PYTHON=/path/to/python skips all of this and uses that interpreter as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from deploy.errors import SetupError
from deploy.interpreter import Interpreter, find_interpreter
from deploy.packages import NEEDED_BYTES, REQUIREMENTS, SERVER_REQUIREMENTS, missing_pins, pip
from deploy.progress import Progress


def main(root: str, arguments: list[str]) -> None:
    """Make the environment if need be and become `python -m deploy.cli`. Does not return."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM raises too, so that pip is ended with us
    try:
        python = os.environ.get("EVERBATCH_PYTHON") or str(ensure(Path(root)))
    except SetupError as error:
        sys.exit(f"everbatch: {error}")
    except KeyboardInterrupt:
        sys.exit("everbatch: interrupted; the next start continues where this one stopped")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    try:
        os.execv(python, [python, "-P", "-m", "deploy.cli", *arguments])  # -P: a ./deploy of the user's is not imported
    except OSError as error:
        sys.exit(
            f"everbatch: {python} cannot be executed ({error.strerror}); unset EVERBATCH_PYTHON or name a Python 3.11"
        )


def ensure(root: Path) -> Path:
    """The environment's Python, made or completed if need be. Raises SetupError."""
    venv = root / ".venv"
    wanted = requirements_hash(root)
    if is_complete(venv, wanted):
        return venv / "bin" / "python"
    progress = Progress()
    with _open_lock(venv) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step("waiting for another everbatch that makes the environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(venv, wanted):
            make(root, venv.resolve(), wanted, progress, lock.fileno())
    return venv / "bin" / "python"


def _open_lock(venv: Path) -> TextIO:
    """The file whose lock is held while the environment is made: beside what `venv` is or leads to. Raises SetupError."""
    path = venv.resolve().parent / ".run" / "environment.lock"
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise SetupError(
            f"{path} cannot be written ({error.strerror}), so the environment cannot be brought up to date; let its owner "
            "run ./everbatch there, or remove .venv to get one of your own"
        ) from None


def requirements_hash(root: Path) -> str:
    """Changes when a pin does."""
    digest = hashlib.sha256()
    for name in (*REQUIREMENTS, SERVER_REQUIREMENTS):
        digest.update(name.encode() + b"\0" + (root / "requirements" / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_complete(venv: Path, wanted: str) -> bool:
    """True if the environment carries the stamp of these requirements and its Python exists. Reads two small files."""
    try:
        stamp = json.loads((venv / "everbatch.json").read_text())
    except (OSError, ValueError):  # There is no stamp, or one that was not written to its end.
        return False
    return (
        stamp.get("requirements") == wanted
        and not (venv / "incomplete").exists()
        and (venv / "bin" / "python").exists()
    )


def make(root: Path, venv: Path, wanted: str, progress: Progress, lock: int) -> None:
    """Make or complete the environment. `lock`: descriptor that pip holds too, should it outlive us. Raises
    SetupError.
    """
    if not runs(venv / "bin" / "python"):
        interpreter = find_interpreter(root, progress)
        check_disk(venv.parent)
        progress.step(f"making {venv.name} with Python {interpreter.version} ({interpreter.path})")
        _make_venv(interpreter, venv)
    elif not (venv / "incomplete").exists() and missing_pins(root, venv) == []:
        _stamp(venv, wanted)  # An environment that was made by hand with the same pins is adopted.
        return
    (venv / "incomplete").touch()
    check_disk(venv.parent)
    pip(venv, _requirement_flags(root), progress, "installing packages (about 1.5 GB on disk, once)", lock)
    server = ["--no-deps", "-r", str(root / "requirements" / SERVER_REQUIREMENTS)]
    pip(venv, server, progress, "installing tritonserver (30 MB)", lock)
    if missing := missing_pins(root, venv):
        raise SetupError(f"{', '.join(missing)} is not there after pip had installed it; remove .venv and start again")
    (venv / "incomplete").unlink(missing_ok=True)
    _stamp(venv, wanted)
    progress.done("environment ready")


def _requirement_flags(root: Path) -> list[str]:
    return [flag for name in REQUIREMENTS for flag in ("-r", str(root / "requirements" / name))]


def _stamp(venv: Path, wanted: str) -> None:
    temporary = venv / "everbatch.json.new"
    temporary.write_text(json.dumps({"requirements": wanted}) + "\n")
    temporary.replace(venv / "everbatch.json")


def _make_venv(interpreter: Interpreter, venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    result = subprocess.run([interpreter.path, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no reason given"]
        raise SetupError(f"{interpreter.path} -m venv failed: {lines[-1]}")


def runs(python: Path) -> bool:
    """True if the interpreter starts and has pip."""
    try:
        return subprocess.run([str(python), "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:  # There is no such file, or one that cannot be executed.
        return False


def check_disk(place: Path) -> None:
    """Raise SetupError when the environment would not fit on the file system of `place`."""
    free = shutil.disk_usage(place).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{free / 1e9:.1f} GB are free under {place}, the environment needs {NEEDED_BYTES / 1e9:.1f} GB; "
            "free some space"
        )
