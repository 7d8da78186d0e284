"""The Triton kernels without a GPU, each way in a process of its own: Triton decides at import what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("folder, variable", [("interpreted", "TRITON_INTERPRET"), ("compiled", "EVERBATCH_TRITON")])
def test_every_kernel_is_proven(folder: str, variable: str) -> None:
    environment = os.environ | {variable: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
