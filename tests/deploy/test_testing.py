"""`./everbatch test`: which tests run, with what, and the second look at those that failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import testing
from deploy.cli import app
from deploy.testing import pytest_arguments


def test_further_test_arguments_replace_the_suite_only_when_they_name_paths() -> None:
    whole = pytest_arguments(["-k", "name", "-n", "0"], 2)
    assert whole[:3] == ["tests", "-n", "3"] and whole[-4:] == ["-k", "name", "-n", "0"]
    assert pytest_arguments([], 64)[:3] == ["tests", "-n", "4"]
    assert pytest_arguments(["tests/deploy", "-x"], 2) == ["tests/deploy", "-x"]
    one = "tests/deploy/test_cli.py::test_the_version_is_printed"
    assert pytest_arguments([one], 2) == [one]


def test_schedules_reach_the_simulation_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(testing.subprocess, "run", run)
    assert CliRunner().invoke(app, ["test", "--schedules", "100000"]).exit_code == 5
    assert seen["EVERBATCH_SCHEDULES"] == "100000"


@pytest.mark.parametrize("given, quick", [(["--quick", "-x"], True), (["-x"], False)])
def test_a_quick_run_is_the_suite_with_an_option_of_its_own(
    given: list[str], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []
    done = subprocess.CompletedProcess([], 0)
    for name in testing.QUICK_SEARCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(testing.subprocess, "run", lambda command, *, env, **_: calls.append((command, env)) or done)
    assert CliRunner().invoke(app, ["test", *given]).exit_code == 0
    ((command, variables),) = calls
    assert ("--quick" in command) == quick and "tests" in command and command[-1] == "-x"
    given_searches = {name: variables[name] for name in testing.QUICK_SEARCHES if name in variables}
    assert given_searches == (testing.QUICK_SEARCHES if quick else {})


def test_processes_of_a_run_keep_the_bytecode_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(testing.subprocess, "run", lambda command, *, env, **_: seen.append(env) or done)
    assert CliRunner().invoke(app, ["test"]).exit_code == 0
    assert "PYTHONDONTWRITEBYTECODE" not in seen[0] and seen[0]["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    "alone, most, status, told",
    [
        ("passes", 1, 0, "failed beside other tests, passed alone: test_it.py::test_that_fails_at_first"),
        ("fails", 1, 1, "1 failed; run once more, alone"),
        ("passes", 0, 1, None),
    ],
)
def test_what_failed_runs_once_more_alone_and_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    alone: str,
    most: int,
    status: int,
    told: str | None,
) -> None:
    """The test under test fails in its first run, and in its second unless `alone` says that it passes there."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(
        f"""
import pathlib
def test_that_passes(): pass
def test_that_fails_at_first():
    first = pathlib.Path({str(tmp_path / "was_run")!r})
    again = first.exists()
    first.touch()
    assert again and {alone == "passes"}
"""
    )
    monkeypatch.setattr(testing, "ROOT", tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTEST")]:  # of the run that this test belongs to
        monkeypatch.delenv(name)
    assert testing.run(["test_it.py"], False, None, most) == status
    printed = capfd.readouterr().out
    assert (told is None or told in printed) and ("run once more" in printed) == (most > 0)


def test_more_failures_than_allowed_are_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    cache = tmp_path / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True)
    cache.write_text('{"a::b": true, "c::d": true}')
    monkeypatch.setattr(testing, "ROOT", tmp_path)
    monkeypatch.setattr(
        testing.subprocess, "run", lambda command, **_: calls.append(command) or subprocess.CompletedProcess([], 1)
    )
    assert testing.run([], False, None, 1) == 1 and len(calls) == 1
    assert testing.run([], False, None, 2) == 1 and calls[-1][-2:] == ["a::b", "c::d"]
