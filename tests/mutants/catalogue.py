"""All planted bugs, and how one is tried: a pytest process of its own, in which the tests named must fail."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SetAttribute = Callable[[object, str, object], None]
TIMEOUT_S = 120.0
INTERPRETED = "tests/kernels/interpreted/"  # tests that Triton's interpreter runs, which it decides when it is imported
TESTS_FAILED = 1  # pytest's exit status; any other one but 0 means that the tests could not be run


class Mutant(NamedTuple):
    name: str  # room:function
    plant: Callable[[SetAttribute], None]
    tests: list[str]  # pytest node ids


def rooms() -> list[str]:
    files = [file for file in HERE.glob("*_mutants.py") if not file.name.startswith("test_")]
    return sorted(file.stem.removesuffix("_mutants") for file in files)


def mutants(chosen: Iterable[str] = ()) -> list[Mutant]:
    """The planted bugs of the rooms named, or of all."""
    found = []
    for room in list(chosen) or rooms():
        module = importlib.import_module(f"tests.mutants.{room}_mutants")
        found += [Mutant(f"{room}:{name}", plant, tests) for name, (plant, tests) in module.MUTANTS.items()]
    return found


def find(name: str) -> Mutant:
    """Raises LookupError for an unknown name."""
    for mutant in mutants([name.partition(":")[0]]):
        if mutant.name == name:
            return mutant
    raise LookupError(f"there is no planted bug {name!r} in tests/mutants")


def run_tests(tests: list[str], mutant: str = "", timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """pytest's exit status and output, with a bug planted or without. A run beyond `timeout_s` counts as failed tests.

    Of `tests` all must be INTERPRETED, or none.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "tests.mutants.plugin",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    if mutant:
        command += ["--mutant", mutant]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if tests[0].startswith(INTERPRETED) else {})
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, f"no end within {timeout_s:.0f} s"
    return done.returncode, done.stdout + done.stderr
