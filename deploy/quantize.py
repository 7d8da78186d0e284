"""The `quantize` command: it checks the options, and runs `python -m backend.quant` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deploy import ROOT
from deploy.errors import UserError
from deploy.model_source import DEFAULT_MODEL

SCHEMES = ("w8a8", "w4a16", "w4a8")
KV_TYPES = ("int8", "int4")
GROUPS = (128, 64, 32, -1)


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of `quantize`, as given."""

    model: str
    scheme: str
    output: Path
    kv: str | None = None
    calibration: str | None = None  # path of a file, or "none"
    group: int | None = None


def quantize(options: QuantizeOptions) -> int:
    """Returns the exit status. Raises UserError for options that cannot be."""
    with subprocess.Popen(command_of(options), cwd=ROOT) as process:
        previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:  # A terminal's Ctrl-C has reached the process, too. It cleans up and ends.
                    process.terminate()
        finally:
            signal.signal(signal.SIGTERM, previous)


def command_of(options: QuantizeOptions) -> list[str]:
    """The command line, paths absolute. Raises UserError."""
    _check("--scheme", options.scheme, SCHEMES)
    if options.kv is not None:
        _check("--kv", options.kv, KV_TYPES)
    if options.group is not None:
        _check("--group", options.group, GROUPS)
    command = [sys.executable, "-m", "backend.quant", _absolute(options.model or str(DEFAULT_MODEL))]
    command += ["--scheme", options.scheme, "--output", str(options.output.expanduser().absolute())]
    if options.kv is not None:
        command += ["--kv", options.kv]
    if options.calibration is not None:
        given = options.calibration
        command += ["--calibration", given if given == "none" else str(Path(given).expanduser().absolute())]
    if options.group is not None:
        command += ["--group", str(options.group)]
    return command


def _absolute(model: str) -> str:
    """A directory that is there; other names stay: a hub id, or what the error will name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _check(option: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} is {value}; use one of {', '.join(map(str, allowed))}")
