"""The `quantize` command: it checks the options, and runs `python -m backend.quant` in a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.model_source import DEFAULT_MODEL
from deploy.offline import absolute, check, run

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
    return run(command_of(options))


def command_of(options: QuantizeOptions) -> list[str]:
    """The command line, paths absolute. Raises UserError."""
    check("--scheme", options.scheme, SCHEMES)
    if options.kv is not None:
        check("--kv", options.kv, KV_TYPES)
    if options.group is not None:
        check("--group", options.group, GROUPS)
    command = [sys.executable, "-m", "backend.quant", absolute(options.model or str(DEFAULT_MODEL))]
    command += ["--scheme", options.scheme, "--output", str(options.output.expanduser().absolute())]
    if options.kv is not None:
        command += ["--kv", options.kv]
    if options.calibration is not None:
        given = options.calibration
        command += ["--calibration", given if given == "none" else str(Path(given).expanduser().absolute())]
    if options.group is not None:
        command += ["--group", str(options.group)]
    return command
