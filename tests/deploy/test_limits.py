"""The limit of open files is raised as far as it goes, and one that is too low is told."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from deploy import ROOT, launch

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "soft, hard, raised_to, is_told",
    [
        (256, 4096, 4096, False),
        (1024, 1 << 30, launch.WANTED_FILES, False),
        (1024, INFINITY, launch.WANTED_FILES, False),
        (256, 512, 512, True),
        (launch.WANTED_FILES * 2, launch.WANTED_FILES * 2, None, False),
        (INFINITY, INFINITY, None, False),
        (launch.NEEDED_FILES, launch.NEEDED_FILES, None, False),
        (launch.NEEDED_FILES - 1, launch.NEEDED_FILES - 1, None, True),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None, is_told: bool
) -> None:
    told: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: told.append((which, both)))
    warning = launch.raise_open_files()
    assert told == ([] if raised_to is None else [(resource.RLIMIT_NOFILE, (raised_to, hard))])
    assert (warning is not None) == is_told
    if warning is not None:
        assert (
            f"may have {raised_to or soft} files open" in warning and f"allow {launch.NEEDED_FILES} or more" in warning
        )


def test_what_is_started_afterwards_has_the_raised_limit() -> None:
    program = f"""
import resource, subprocess, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
sys.path.insert(0, {str(ROOT)!r})
from deploy import launch
launch.raise_open_files()
print(min(hard, launch.WANTED_FILES), flush=True)
subprocess.run(["sh", "-c", "ulimit -n"], check=True)
"""
    said = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    wanted, has = said.split()
    assert wanted == has
