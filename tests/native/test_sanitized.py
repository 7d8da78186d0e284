"""The native kernels' tests in a process with AddressSanitizer: nothing is read or written outside its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import NativeUnavailable, asan_environment
from tests.native.harness import SANITIZE

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    f"tests/native/test_{name}.py"
    for name in (
        "linear",
        "four_bits",
        "rounding",
        "choices",
        "super_blocks",
        "rows",
        "bad_rows",
        "decoder",
        "long_contexts",
        "lora",
        "screen",
        "blocks",
        "attention",
        "recurrence",
    )
]
TIMEOUT_S = 540  # below pytest's own


def test_nothing_is_read_or_written_outside_its_memory() -> None:
    try:
        environment = os.environ | asan_environment() | {SANITIZE: "1"}
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]
    child = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    assert "passed" in child.stdout and "skipped" not in child.stdout
