"""The commands that make checkpoints, `convert` and `quantize`: they check the options, and run `python -m backend.convert` or
`python -m backend.quant` in a process of its own, which ends with the launcher.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import ROOT
from deploy.errors import UserError
from deploy.model_source import DEFAULT_MODEL

FORMS = ("huggingface", "meta", "gguf")
DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 1 << 21
MAX_FACTOR = 1024
SCHEMES = ("w8a8", "w4a16", "w4a8")
KV_TYPES = ("int8", "int4")
GROUPS = (128, 64, 32, -1)


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `convert`, as given."""

    model: str
    output: Path
    to: str = "huggingface"
    dtype: str | None = None
    max_positions: int | None = None
    rope_factor: float | None = None
    type: str | None = None  # the name of a GGUF file's type
    importance: str | None = None  # measured, none, or the path of a file
    tokenizer: str | None = None


def convert(options: ConvertOptions) -> int:
    """Returns the exit status. Raises UserError for options that cannot be."""
    return _run(convert_command(options))


def convert_command(options: ConvertOptions) -> list[str]:
    """The command line, paths absolute. Raises UserError."""
    _check("--to", options.to, FORMS)
    command = [sys.executable, "-m", "backend.convert", _absolute(options.model)]
    command += ["--output", str(options.output.expanduser().absolute()), "--to", options.to]
    if options.dtype is not None:
        _check("--dtype", options.dtype, DTYPES)
        command += ["--dtype", options.dtype]
    if options.max_positions is not None:
        if not 1 <= options.max_positions <= MAX_POSITIONS:
            raise UserError(f"--max-positions is {options.max_positions}; use 1 to {MAX_POSITIONS}")
        command += ["--max-positions", str(options.max_positions)]
    if options.rope_factor is not None:
        if not math.isfinite(options.rope_factor) or not 1 <= options.rope_factor <= MAX_FACTOR:
            raise UserError(f"--rope-factor is {options.rope_factor}; use 1 to {MAX_FACTOR}")
        command += ["--rope-factor", str(options.rope_factor)]
    if options.to == "gguf" and options.dtype is not None:
        raise UserError("--dtype is of safetensors and Meta's files; use --type for a GGUF file")
    if options.to == "gguf" and options.output.suffix != ".gguf":
        raise UserError(f"--output is {options.output}, a GGUF file is written; give a name that ends in .gguf")
    of_gguf = {"--type": options.type, "--importance": options.importance, "--tokenizer": options.tokenizer}
    for option, value in of_gguf.items():
        if value is None:
            continue
        if options.to != "gguf":
            raise UserError(f"{option} is of GGUF files; use it with --to gguf")
        command += [option, _absolute(value) if option == "--importance" else value]
    return command


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
    return _run(quantize_command(options))


def quantize_command(options: QuantizeOptions) -> list[str]:
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


def _run(command: Sequence[str]) -> int:
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


def _absolute(model: str) -> str:
    """A directory that is there; other names stay: a hub id, or what the error will name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _check(option: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raises UserError."""
    if value not in allowed:
        raise UserError(f"{option} is {value}; use one of {', '.join(map(str, allowed))}")
