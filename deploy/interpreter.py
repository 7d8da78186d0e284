"""The CPython that carries the environment: found, asked what it is, and completed where that is allowed.

Standard library only, and any Python >= 3.9 runs it.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import SetupError
from deploy.progress import SteppedProgress

VERSIONS = ("3.11", "3.12")  # For these the wheel has a stub, and there is a numpy < 2.
_PROBE = (
    "import json,sys,importlib.util as u;"
    "sys.path.insert(0,sys.argv[1]);from deploy import libpython;"
    "print(json.dumps([sys.implementation.name,'%d.%d'%sys.version_info[:2],sys.executable,"
    "u.find_spec('ensurepip') is not None,libpython.find() is not None]))"
)


@dataclass(frozen=True)
class Interpreter:
    """A CPython that could carry the environment."""

    path: str
    version: str
    has_venv: bool
    has_libpython: bool

    @property
    def missing_packages(self) -> list[str]:
        """Debian packages without which the environment or the stub cannot work."""
        names = [] if self.has_venv else [f"python{self.version}-venv"]
        return names if self.has_libpython else [*names, f"libpython{self.version}"]


def find_interpreter(root: Path, progress: SteppedProgress) -> Interpreter:
    """The best CPython of this machine for the environment, after installing what it lacks where that is allowed."""
    found = [interpreter for path in candidates() for interpreter in [inspect(root, path)] if interpreter is not None]
    if not found:
        raise SetupError(
            f"no CPython {' or '.join(VERSIONS)} found on PATH, in /usr/bin, /usr/local/bin or ~/.pyenv; "
            "install one, on Debian with: apt-get install -y python3.11-venv libpython3.11"
        )
    best = min(found, key=lambda interpreter: len(interpreter.missing_packages))  # min() takes the first of equals
    if best.missing_packages:
        install_system_packages(best.missing_packages, progress)
        best = inspect(root, best.path) or best
    if best.missing_packages:
        raise SetupError(
            f"Python {best.version} lacks a part; run: apt-get install -y {' '.join(best.missing_packages)}"
        )
    return best


def candidates() -> Iterator[str]:
    """Paths that may be a suitable Python, best first: 3.11 before 3.12, PATH before the usual places."""
    seen = set()
    own = "{}.{}".format(*sys.version_info[:2])
    for version in VERSIONS:
        paths = [sys.executable] if own == version else []
        paths.append(shutil.which(f"python{version}") or "")
        paths += [f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"]
        paths += sorted(
            glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python{version}")), reverse=True
        )
        for path in paths:
            if path and path not in seen and os.access(path, os.X_OK):
                seen.add(path)
                yield path


def inspect(root: Path, path: str) -> Interpreter | None:
    """Run a candidate and ask it what it is. None if it does not run or is none of VERSIONS."""
    try:
        result = subprocess.run(
            [path, "-S", "-c", _PROBE, str(root)], capture_output=True, text=True, timeout=20, check=False
        )
        name, version, executable, has_venv, has_libpython = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if name != "cpython" or version not in VERSIONS:
        return None
    return Interpreter(executable, version, has_venv, has_libpython)


def install_system_packages(names: list[str], progress: SteppedProgress) -> None:
    """apt-get install, when root on a Debian-like machine; otherwise SetupError naming the one command."""
    command = f"apt-get install -y {' '.join(names)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"{' and '.join(names)} is missing; run as root: {command}")
    progress.step(f"installing {' '.join(names)} with apt-get")
    variables = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", *names]):
        result = subprocess.run(["apt-get", *arguments], capture_output=True, text=True, env=variables, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(f"apt-get could not install {' '.join(names)} ({reason}); run: apt-get update && {command}")
