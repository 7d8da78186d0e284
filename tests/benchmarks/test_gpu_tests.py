"""tests/gpu: skipped without a GPU, and run without pytest, in the interpreter, so that they are right when there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.early import Child

ROOT = Path(__file__).parents[2]
WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = None
sys.argv = ["tests.gpu", "--first"]
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""


def process_of(*command: str, **variables: str) -> Child:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return Child([sys.executable, *command], environment, str(ROOT))


def in_the_interpreter(script: str) -> Child:
    return process_of("-c", script, EVERBATCH_GPU_TESTS="cpu", TRITON_INTERPRET="1")


@pytest.mark.early(plan=lambda: in_the_interpreter(WITHOUT_PYTEST))
def test_a_case_of_each_passes_in_the_interpreter_without_pytest(child: subprocess.CompletedProcess[str]) -> None:
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " 0 failed on cpu" in child.stdout and child.stdout.count("\nok ") >= 20


def with_a_wrong_kernel() -> Child:
    """A decode attention that returns twice what it should."""
    broken = WITHOUT_PYTEST.replace('"--first"', '"--first", "test_decode_attention"')
    broken = "from kernels import decode_attention as d\nright = d.decode_attention\n" + broken.replace(
        "runpy.run", "d.decode_attention = lambda *a, **k: 2 * right(*a, **k)\nrunpy.run"
    )
    return in_the_interpreter(broken)


@pytest.mark.early(plan=with_a_wrong_kernel)
def test_a_wrong_kernel_fails_them(child: subprocess.CompletedProcess[str]) -> None:
    assert child.returncode == 1 and "1 failed on cpu" in child.stdout, child.stdout + child.stderr


@pytest.mark.early(plan=lambda: process_of("-m", "tests.gpu", CUDA_VISIBLE_DEVICES=""))
def test_without_a_gpu_they_say_that_they_are_skipped(child: subprocess.CompletedProcess[str]) -> None:
    assert child.returncode == 0 and child.stdout == "skipped: there is no CUDA device\n"
