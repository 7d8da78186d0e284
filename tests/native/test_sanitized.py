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
FILES = [f"tests/native/test_{name}.py" for name in ("linear", "rows", "bad_rows", "decoder", "screen")]


@pytest.mark.skipif(SANITIZE in os.environ, reason="this is the sanitized process")
def test_nothing_is_read_or_written_outside_its_memory() -> None:
    try:
        environment = os.environ | asan_environment() | {SANITIZE: "1"}
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
