"""Paths of a command line: benchmarks run in the checkout, wherever `./everbatch bench` was called."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "EVERBATCH_CALLED_FROM"


def from_caller(path: Path) -> Path:
    """A path as the caller meant it: relative ones begin at the directory where the command was given."""
    return Path(os.environ.get(VARIABLE) or Path.cwd()) / path
