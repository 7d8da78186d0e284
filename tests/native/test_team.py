"""The threads of a step (native/team.h) under the worst of schedules, and with ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES
from tests.native.test_build import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++")
PROGRAM = Path(__file__).with_name("team.cpp")
PHASES = 20_000
# ThreadSanitizer of gcc 12 does not find its way in all address layouts.
UNSHUFFLED = ["setarch", "--addr-no-randomize"]


@pytest.fixture(scope="module", params=["plain", "thread"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("team") / request.param
    sanitizer = ["-fsanitize=thread"] if request.param == "thread" else []
    options = ["-O1", "-g", "-std=c++17", "-fopenmp", *sanitizer, f"-I{SOURCES}"]
    done = subprocess.run([COMPILER, *options, str(PROGRAM), "-o", str(path)], capture_output=True, text=True)
    if sanitizer and ("tsan" in done.stderr or not shutil.which(UNSHUFFLED[0])):
        pytest.skip("this compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return [*(UNSHUFFLED if sanitizer else []), str(path)]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_item_is_done_once_in_its_phase_and_nobody_waits_for_a_thread_that_does_not_come(
    program: list[str], threads: int
) -> None:
    done = subprocess.run([*program, str(threads), str(PHASES)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 wrong, ")
