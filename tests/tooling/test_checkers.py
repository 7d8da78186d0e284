"""ruff (lint and format) and mypy --strict find nothing. All in the versions that requirements/test.txt pins."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT, packages

STRICT = ("backend", "compat", "kernels", "tools", "deploy", "client", "gateway")  # what passes mypy --strict
IN_CI = ("CI", "EVERBATCH_RUN_PREFIX")  # .ci/run sets the second


def checker(name: str) -> list[str]:
    """The command of the pinned checker. Skips where the environment lacks it; .ci/run's is made of the pins."""
    wanted = dict(packages.pins(ROOT))[name]
    try:
        present = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        present = "none"
    if present != wanted:
        reason = f"{name} {wanted} is pinned, {present} is installed: ./everbatch brings its environment up to date"
        if any(variable in os.environ for variable in IN_CI):
            pytest.fail(reason)
        pytest.skip(reason)
    return [sys.executable, "-m", name]


def nothing_found(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_ruff_check_finds_nothing() -> None:
    nothing_found(*checker("ruff"), "check", "--no-cache", ".")


def test_ruff_format_would_change_nothing() -> None:
    nothing_found(*checker("ruff"), "format", "--no-cache", "--check", ".")


def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    """Rooms that are only imported are read and not judged."""
    nothing_found(*checker("mypy"), "--cache-dir", str(tmp_path), "--follow-imports", "silent", *STRICT)


def test_only_device_code_lacks_annotations() -> None:
    """pyproject.toml lets functions of some kernels' files go without them, which is meant for those under @jit."""
    files = sorted((ROOT / "kernels").rglob("*.py"))
    found = {
        f"{path.relative_to(ROOT)}:{function.lineno}"
        for path in files
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and not is_device_code(function) and not is_annotated(function)
    }
    assert files and not found


def is_device_code(function: ast.FunctionDef) -> bool:
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return any(isinstance(each, ast.Name) and each.id == "jit" for each in calls)


def is_annotated(function: ast.FunctionDef) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    returns = function.returns is not None or function.name == "__init__"
    return returns and all(argument.annotation is not None for argument in named)
