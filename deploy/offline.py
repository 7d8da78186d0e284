"""Commands that make checkpoints: each runs in a process of its own, which ends with the launcher."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy import ROOT
from deploy.errors import UserError


def run(command: Sequence[str]) -> int:
    """Returns the exit status."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:  # A terminal's Ctrl-C has reached the process, too. It cleans up and ends.
                    process.terminate()
        finally:
            signal.signal(signal.SIGTERM, previous)


def absolute(model: str) -> str:
    """A directory that is there; other names stay: a hub id, or what the error will name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def check(option: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raises UserError."""
    if value not in allowed:
        raise UserError(f"{option} is {value}; use one of {', '.join(map(str, allowed))}")
