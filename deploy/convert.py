"""The `convert` command: it checks the options, and runs `python -m backend.convert` in a process of its own."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError
from deploy.offline import absolute, check, run

FORMS = ("huggingface", "meta")
DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 1 << 21
MAX_FACTOR = 1024


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `convert`, as given."""

    model: str
    output: Path
    to: str = "huggingface"
    dtype: str | None = None
    max_positions: int | None = None
    rope_factor: float | None = None


def convert(options: ConvertOptions) -> int:
    """Returns the exit status. Raises UserError for options that cannot be."""
    return run(command_of(options))


def command_of(options: ConvertOptions) -> list[str]:
    """The command line, paths absolute. Raises UserError."""
    check("--to", options.to, FORMS)
    command = [sys.executable, "-m", "backend.convert", absolute(options.model)]
    command += ["--output", str(options.output.expanduser().absolute()), "--to", options.to]
    if options.dtype is not None:
        check("--dtype", options.dtype, DTYPES)
        command += ["--dtype", options.dtype]
    if options.max_positions is not None:
        if not 1 <= options.max_positions <= MAX_POSITIONS:
            raise UserError(f"--max-positions is {options.max_positions}; use 1 to {MAX_POSITIONS}")
        command += ["--max-positions", str(options.max_positions)]
    if options.rope_factor is not None:
        if not math.isfinite(options.rope_factor) or not 1 <= options.rope_factor <= MAX_FACTOR:
            raise UserError(f"--rope-factor is {options.rope_factor}; use 1 to {MAX_FACTOR}")
        command += ["--rope-factor", str(options.rope_factor)]
    return command
