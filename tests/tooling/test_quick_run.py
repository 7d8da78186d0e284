"""`--quick` leaves out what is slow and says so; every run of several files ends with its slowest ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import SHOWN, SLOW, slowest

pytest_plugins = ("pytester",)
ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.quick import Quick, Slowest
def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true")
def pytest_configure(config):
    config.addinivalue_line("markers", "slow(reason): left out by --quick")
    config.pluginmanager.register(Quick(config.getoption("--quick")))
    config.pluginmanager.register(Slowest())
"""
FILES = {
    "tests/e2e/test_a.py": "def test_one(): pass\ndef test_two(): pass\n",
    "tests/unit/test_b.py": "import pytest\ndef test_three(): pass\n@pytest.mark.slow('a long way')\ndef test_four(): pass\n",
}


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Four tests: two in a folder that is slow, one that is marked slow, one that is neither."""
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return pytester


def test_a_quick_run_leaves_out_slow_folders_and_marks_and_says_so(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("tests", "--quick")
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(
        ["left out: tests/e2e/ (real tritonservers), 2 tests", "left out: tests/unit/test_b.py (a long way), 1 tests"]
    )


def test_workers_leave_out_the_same_and_it_is_said_once(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = suite.runpytest_subprocess("tests", "--quick", "-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("left out: tests/e2e/ (real tritonservers), 2 tests") == 1


def test_what_is_slow_runs_first(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("tests", "-v")
    result.stdout.fnmatch_lines(["*test_one*", "*test_two*", "*test_four*", "*test_three*"])


def test_a_full_run_leaves_nothing_out_and_ends_with_the_slowest_files(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("tests")
    result.assert_outcomes(passed=4)
    assert "left out" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*slowest files, of 2 with*", "* s  tests/*/test_?.py", "* s  tests/*/test_?.py"])


def test_what_is_slow_can_be_chosen_by_its_mark(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("tests", "-m", "slow").assert_outcomes(passed=3, deselected=1)


def test_the_slowest_come_first_and_are_not_many() -> None:
    seconds = {f"file{number}": float(number) for number in range(2 * SHOWN)}
    shown = slowest(seconds)
    assert len(shown) == SHOWN and shown[0] == (f"file{2 * SHOWN - 1}", 2.0 * SHOWN - 1)
    assert [value for _, value in shown] == sorted((value for _, value in shown), reverse=True)


@pytest.mark.parametrize("beginning", SLOW)
def test_what_is_called_slow_is_there(beginning: str) -> None:
    assert (ROOT / beginning.split("::")[0]).exists()
