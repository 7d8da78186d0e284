"""tests/early.py: a process that a test waits for begins with a large run, and ends with the run at the latest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
CONFTEST = """
from tests.early import Early
def pytest_configure(config):
    config.addinivalue_line("markers", "early(plan): the process of the fixture `child`")
    config.pluginmanager.register(Early(large=3))
"""
WAITS = """
import os, sys, threading, time
import pytest
from pathlib import Path
from tests.early import Child

STARTED = Path(__file__).with_name("started")
CODE = "import os, time; open('started', 'a').write(f'{os.getpid()} '); print(os.environ['THREAD'])\\n"

def seen():
    until = time.monotonic() + 60
    while not STARTED.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return STARTED.exists()

def plan(how):
    variables = {"THREAD": threading.current_thread().name.split("_")[0]}
    return Child([sys.executable, "-c", CODE + how], os.environ | variables, str(STARTED.parent))
"""
FIRST = """
def test_first():
    assert seen()
def test_second():
    pass
"""
CHILD = """
@pytest.mark.early(plan=plan)
@pytest.mark.parametrize("how", ["raise SystemExit(3)"])
def test_child(how, child):
    assert (child.returncode, child.stdout) == (3, "early\\n")
    assert len(STARTED.read_text().split()) == 1
"""


@pytest.fixture
def run_in(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    pytester.makeconftest(CONFTEST)
    return pytester


def test_in_a_large_run_the_process_is_there_before_its_test(run_in: pytest.Pytester) -> None:
    run_in.makepyfile(WAITS + FIRST + CHILD)
    run_in.runpytest_inprocess().assert_outcomes(passed=3)


def test_in_a_small_run_it_begins_with_its_test(run_in: pytest.Pytester) -> None:
    run_in.makepyfile(WAITS + "def test_first():\n    pass\n" + CHILD.replace("early\\n", "MainThread\\n"))
    run_in.runpytest_inprocess().assert_outcomes(passed=2)


def test_one_that_has_not_begun_when_its_test_does_runs_at_once(run_in: pytest.Pytester) -> None:
    """Tests run in the reverse order of the processes: the one that runs beside them waits for what the other does."""
    waits = "while not os.path.exists('made'): time.sleep(0.01)"
    both = CHILD.split("    assert")[0].replace('"raise SystemExit(3)"', f"\"{waits}\", \"open('made', 'w')\"")
    run_in.makepyfile(WAITS + FIRST + both + "    assert child.returncode == 0\n")
    run_in.makeconftest(CONFTEST + "def pytest_runtestloop(session):\n    session.items.reverse()\n")
    run_in.runpytest_inprocess().assert_outcomes(passed=4)


def test_a_run_that_breaks_off_ends_the_process(run_in: pytest.Pytester) -> None:
    fails = FIRST.replace("assert seen()", "assert not seen()")
    run_in.makepyfile(WAITS + fails + CHILD.replace("raise SystemExit(3)", "time.sleep(900)"))
    run_in.runpytest_inprocess("-x").assert_outcomes(failed=1)
    pid = int(Path(run_in.path, "started").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
