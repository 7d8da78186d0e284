"""The Triton kernels without a GPU, each way in a process of its own: Triton decides at import what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 1140  # below pytest's own


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("folder, variable", [("interpreted", "TRITON_INTERPRET"), ("compiled", "EVERBATCH_TRITON")])
def test_every_kernel_is_proven(folder: str, variable: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / folder)]
    child = subprocess.run(command, env=os.environ | {variable: "1"}, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
