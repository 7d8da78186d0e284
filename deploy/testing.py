"""The test-suite as `./everbatch test` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy import ROOT

# Random schedules of the engine simulation, of which a full run has 500, and random texts, of which it has 2,000.
QUICK_SEARCHES = {"EVERBATCH_SCHEDULES": "300", "EVERBATCH_EXAMPLES": "500"}
MOST_TEST_WORKERS = 4  # some tests take turns at what all share: more processes would wait
WAITING_WORKERS = 1  # more than cores: tests of real servers wait for a third of their time
PYTEST = (sys.executable, "-m", "pytest")


def run(given: Sequence[str], quick: bool, schedules: int | None, again_alone: int) -> int:
    """Run the suite, or what the pytest arguments `given` name. Returns pytest's exit status.

    `again_alone`: up to so many failed tests are run once more, one after the other.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each of the hundreds of processes would compile the modules again
    if schedules is not None:
        variables["EVERBATCH_SCHEDULES"] = str(schedules)
    if quick:
        variables = QUICK_SEARCHES | variables
    arguments = [*(["--quick"] if quick else []), *pytest_arguments(list(given), len(os.sched_getaffinity(0)))]
    if again_alone:
        arguments.append("--cache-clear")  # it would hold failures of earlier runs
    status = _pytest(arguments, variables)
    return _run_again_alone(again_alone, variables) if status == 1 and again_alone else status


def show_features() -> int:
    """Print which promised features have tests, and what is open."""
    return subprocess.run([sys.executable, "-m", "tests.feature_coverage"], cwd=ROOT, check=False).returncode


def pytest_arguments(given: list[str], cores: int) -> list[str]:
    """`given`, with the whole suite in front unless it names files or directories; MOST_TEST_WORKERS or fewer run file by file.

    The last of several values counts for pytest, so `-n 0` runs all in one process.
    """
    names_paths = any(
        Path(ROOT, argument.split("::", 1)[0]).exists() for argument in given if not argument.startswith("-")
    )
    workers = [
        "-n",
        str(min(cores + WAITING_WORKERS, MOST_TEST_WORKERS)),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    ]
    return given if names_paths else ["tests", *workers, *given]


def _run_again_alone(most: int, variables: dict[str, str]) -> int:
    """Run the failed tests once more, without other tests beside them. Returns its exit status; 1 for more than `most`.

    In a full run servers and their clocks share the cores with other tests. What passes only alone is named, to be looked at.
    """
    failed = _failed_tests()
    if not 0 < len(failed) <= most:
        return 1
    print(f"\n{len(failed)} failed; run once more, alone", flush=True)
    # The cache of pytest stays that of the whole run.
    status = _pytest(["-n", "0", "-p", "no:cacheprovider", *failed], variables)
    if status == 0:
        for name in failed:
            print(f"failed beside other tests, passed alone: {name}", flush=True)
    return status


def _failed_tests() -> list[str]:
    """The tests, or files that could not be read, that failed in the latest run of pytest, as its cache tells."""
    try:
        return list(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def _pytest(arguments: Sequence[str], variables: dict[str, str]) -> int:
    return subprocess.run([*PYTEST, *arguments], cwd=ROOT, env=variables, check=False).returncode
