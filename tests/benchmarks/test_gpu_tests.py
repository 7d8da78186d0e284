"""tests/gpu: skipped without a GPU, and run without pytest, in the interpreter, so that they are right when there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = None
sys.argv = ["tests.gpu", "--first"]
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_a_case_of_each_passes_in_the_interpreter_without_pytest() -> None:
    done = run("-c", WITHOUT_PYTEST, EVERBATCH_GPU_TESTS="cpu", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " 0 failed on cpu" in done.stdout and done.stdout.count("\nok ") >= 20


def test_a_wrong_kernel_fails_them() -> None:
    """The runner notices: a decode attention that returns twice what it should."""
    broken = WITHOUT_PYTEST.replace('"--first"', '"--first", "test_decode_attention"')
    broken = "from kernels import decode_attention as d\nright = d.decode_attention\n" + broken.replace(
        "runpy.run", "d.decode_attention = lambda *a, **k: 2 * right(*a, **k)\nrunpy.run"
    )
    done = run("-c", broken, EVERBATCH_GPU_TESTS="cpu", TRITON_INTERPRET="1")
    assert done.returncode == 1 and "1 failed on cpu" in done.stdout, done.stdout + done.stderr


def test_without_a_gpu_they_say_that_they_are_skipped() -> None:
    done = run("-m", "tests.gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stdout == "skipped: there is no CUDA device\n"
