"""The Triton kernels without a GPU, each way in a process of its own: Triton decides at import what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.early import Child

HERE = Path(__file__).parent


def process_of(folder: str, variable: str) -> Child:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / folder)]
    return Child(command, os.environ | {variable: "1"})


@pytest.mark.early(plan=process_of)
@pytest.mark.parametrize("folder, variable", [("interpreted", "TRITON_INTERPRET"), ("compiled", "EVERBATCH_TRITON")])
def test_every_kernel_is_proven(folder: str, variable: str, child: subprocess.CompletedProcess[str]) -> None:
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
