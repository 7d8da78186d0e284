"""ruff (lint and format) and mypy --strict find nothing. All in the versions that requirements/test.txt pins."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT, packages

PURE = ("api", "core", "kvcache", "scheduler", "engine", "wire")
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


def test_mypy_strict_finds_nothing_in_the_pure_rooms(tmp_path: Path) -> None:
    rooms = [argument for room in PURE for argument in ("-p", f"backend.{room}")]
    nothing_found(*checker("mypy"), "--cache-dir", str(tmp_path), *rooms)


def test_mypy_strict_finds_nothing_in_the_launcher_and_the_client(tmp_path: Path) -> None:
    nothing_found(*checker("mypy"), "--cache-dir", str(tmp_path), "-p", "deploy", "-p", "client")
