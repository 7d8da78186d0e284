"""Runs tests of Triton kernels in a process of their own: Triton decides at import what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INTERPRETED = Path(__file__).parent / "interpreted"
# Whole engines and models, which take as long as all other interpreted tests together: another worker of the suite runs them.
ENGINES = [
    INTERPRETED / f"test_{name}.py"
    for name in (
        "adapters",
        "description",
        "device_runner",
        "draft_model",
        "drafts",
        "guided_rows",
        "model",
        "prompt_inputs",
        "recurrent_models",
    )
]
PYTEST_TIMEOUT_S = 1200
_CHILD_TIMEOUT_S = PYTEST_TIMEOUT_S - 60  # so that the child's own words are seen


def prove(variable: str, *arguments: str | Path) -> None:
    """Run pytest with `variable` set to 1. AssertionError with the end of its output if a test fails, or if none runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, arguments)]
    child = subprocess.run(
        command, env=os.environ | {variable: "1"}, text=True, capture_output=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
