"""All planted bugs, and how one is tried: the tests named must fail in a process that has it and has run nothing before."""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutants.prepared import NO_END, Prepared
from tests.serving import fake_triton

HERE = Path(__file__).parent
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
    sys.modules.setdefault("triton_python_backend_utils", fake_triton)  # Rooms import backend.serving, which needs it.
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
    arguments = ["-q", "-x", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider", *tests]
    if mutant:
        arguments += ["--mutant", mutant]
    environment = {"TRITON_INTERPRET": "1"} if tests[0].startswith(INTERPRETED) else {}
    status, output = _prepared().run(arguments, environment, timeout_s)
    return (TESTS_FAILED, f"no end within {timeout_s:.0f} s") if status == NO_END else (status, output)


@cache
def _prepared() -> Prepared:
    """The process in whose forks the tests run; it ends with this one."""
    prepared = Prepared()
    atexit.register(prepared.close)
    return prepared
