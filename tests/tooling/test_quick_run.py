"""`--quick` leaves out what is slow and says so; every run of several files ends with its slowest ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import NIGHT, SHOWN, SLOW, slowest
from tests.samples import EVERY, SAMPLED, Share

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
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(
        ["left out: tests/e2e/ (real tritonservers)", "left out: tests/unit/test_b.py (a long way), 1 tests"]
    )


def test_what_a_quick_run_leaves_out_is_not_imported_unless_it_is_named(suite: pytest.Pytester) -> None:
    (suite.path / "tests/e2e/test_broken.py").write_text("raise ValueError\n")
    suite.runpytest_inprocess("tests", "--quick").assert_outcomes(passed=1, deselected=1)
    suite.runpytest_inprocess("tests/e2e/test_a.py", "--quick").assert_outcomes(deselected=2)
    suite.runpytest_inprocess("tests/e2e/test_broken.py", "--quick").assert_outcomes(errors=1)


def test_what_is_for_nights_runs_when_all_is_asked_for_or_it_is_named(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EVERY, raising=False)
    monkeypatch.setitem(NIGHT, "tests/unit/test_b.py", "hours")
    result = suite.runpytest_inprocess("tests")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["left out: tests/unit/test_b.py (hours)", f"{EVERY}=1 ./everbatch test runs all"])
    suite.runpytest_inprocess("tests/unit/test_b.py").assert_outcomes(passed=2)
    monkeypatch.setenv(EVERY, "1")
    suite.runpytest_inprocess("tests").assert_outcomes(passed=4)


@pytest.fixture
def combinations(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Files of tests that are sampled: with up to 14 values, and with 6 x 2 values, six of a fixture of the module."""
    monkeypatch.delenv(EVERY, raising=False)
    monkeypatch.setitem(SAMPLED, "tests/cases/", Share(5, 4))
    (suite.path / "tests/cases").mkdir()
    one = "import pytest\n@pytest.mark.parametrize('x', range({0}))\ndef test_{0}(x): pass\n"
    (suite.path / "tests/cases/test_c.py").write_text("".join(map(one.format, (1, 3, 5, 10, 11, 14))))
    crossed = """
import pytest
@pytest.fixture(scope="module", params="abcdef")
def model(request):
    return request.param
@pytest.mark.parametrize("form", [(1, 2), (1, 3)])
def test_first(model, form): pass
@pytest.mark.parametrize("form", [(1, 2), (1, 3)])
def test_second(model, form): pass
"""
    (suite.path / "tests/cases/test_d.py").write_text(crossed)
    return suite


def cases_of(result: pytest.RunResult, test: str) -> list[str]:
    return sorted(line.split("[", 1)[1].split("]")[0] for line in result.outlines if f"::{test}[" in line)


def test_a_quick_run_has_some_cases_of_each_test_that_is_sampled(combinations: pytest.Pytester) -> None:
    result = combinations.runpytest_inprocess("tests/cases", "--quick", "-v")
    assert [len(cases_of(result, f"test_{count}")) for count in (1, 3, 5, 10)] == [1, 1, 1, 2]
    assert len(cases_of(result, "test_first")) in (2, 3)
    result.stdout.fnmatch_lines(["left out: cases of tests/cases/, *", f"{EVERY}=1 ./everbatch test runs all"])


def test_a_full_run_leaves_out_combinations_but_no_value(combinations: pytest.Pytester) -> None:
    result = combinations.runpytest_inprocess("tests/cases", "-v")
    assert [len(cases_of(result, f"test_{count}")) for count in (1, 3, 5, 10, 11, 14)] == [1, 3, 5, 10, 11, 14]
    first, second = cases_of(result, "test_first"), cases_of(result, "test_second")
    assert first == second and len(first) == 6, "what the module's fixture makes is made for few cases"
    assert {case[0] for case in first} == set("abcdef") and {case[1:] for case in first} == {"-form0", "-form1"}
    result.stdout.fnmatch_lines(["left out: cases of tests/cases/, 12 tests", f"{EVERY}=1 ./everbatch test runs all"])


@pytest.mark.parametrize("quick", [(), ("--quick",)], ids=["full", "quick"])
def test_all_cases_can_be_asked_for(
    combinations: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, quick: tuple[str, ...]
) -> None:
    option = "def pytest_addoption(parser):\n    parser.addoption('--mutant', default='')\n"
    (combinations.path / "bug.py").write_text(option)
    combinations.syspathinsert()
    named = combinations.runpytest_inprocess("tests/cases/test_d.py::test_first", *quick)
    named.assert_outcomes(passed=12)
    planted = combinations.runpytest_inprocess("tests/cases/test_d.py", "-p", "bug", "--mutant", "room:name", *quick)
    planted.assert_outcomes(passed=24)
    monkeypatch.setenv(EVERY, "1")
    result = combinations.runpytest_inprocess("tests/cases", *quick)
    result.assert_outcomes(passed=44 + 24)
    assert "left out: cases" not in result.stdout.str()


def test_workers_leave_out_the_same_and_it_is_said_once(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = suite.runpytest_subprocess("tests", "--quick", "-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("left out: tests/e2e/ (real tritonservers)\n") == 1


def test_what_is_slow_runs_first(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("tests", "-v")
    result.stdout.fnmatch_lines(["*test_one*", "*test_two*", "*test_four*", "*test_three*"])


def test_a_full_run_leaves_out_no_slow_test_and_ends_with_the_slowest_files(suite: pytest.Pytester) -> None:
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


@pytest.mark.parametrize("beginning", [*SLOW, *NIGHT, *SAMPLED])
def test_what_is_called_slow_is_there(beginning: str) -> None:
    assert (ROOT / beginning.split("::")[0]).exists()
