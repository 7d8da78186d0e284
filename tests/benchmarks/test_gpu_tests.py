"""tests/gpu: skipped without a GPU, and run without pytest, in the interpreter, so that they are right when there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 540  # below pytest's own
WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = None
sys.argv = ["tests.gpu", "--first"]
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S)


def in_the_interpreter(script: str) -> subprocess.CompletedProcess[str]:
    return python("-c", script, EVERBATCH_GPU_TESTS="cpu", TRITON_INTERPRET="1")


def test_a_case_of_each_passes_in_the_interpreter_without_pytest() -> None:
    child = in_the_interpreter(WITHOUT_PYTEST)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " 0 failed on cpu" in child.stdout and child.stdout.count("\nok ") >= 20


def test_a_wrong_kernel_fails_them() -> None:
    """A decode attention that returns twice what it should."""
    broken = WITHOUT_PYTEST.replace('"--first"', '"--first", "test_decode_attention"')
    broken = "from kernels import decode_attention as d\nright = d.decode_attention\n" + broken.replace(
        "runpy.run", "d.decode_attention = lambda *a, **k: 2 * right(*a, **k)\nrunpy.run"
    )
    child = in_the_interpreter(broken)
    assert child.returncode == 1 and "1 failed on cpu" in child.stdout, child.stdout + child.stderr


def test_without_a_gpu_they_say_that_they_are_skipped() -> None:
    child = python("-m", "tests.gpu", CUDA_VISIBLE_DEVICES="")
    assert child.returncode == 0 and child.stdout == "skipped: there is no CUDA device\n"
