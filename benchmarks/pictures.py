"""matplotlib, which only pictures of benchmarks need: serving is installed without it."""

from __future__ import annotations

import importlib
from typing import Any


def pyplot() -> Any:
    """matplotlib.pyplot for files, never for a screen. Ends the program in one sentence where it is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        raise SystemExit("no picture: matplotlib is not installed; pip install -r requirements/bench.txt") from None
    return importlib.import_module("matplotlib.pyplot")
