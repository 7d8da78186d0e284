"""Tests that only start a process and wait for it: in a large run the process starts with the session, on another core.

A test says which process with `@pytest.mark.early(plan=plan)`: plan(**parameters of the test) returns a Child, and the fixture
`child` is the ended process. In a small run, or with a single core, it runs when the test does. Registered by
tests/conftest.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

LARGE = 1000  # tests: fewer are over before the processes would be
NICENESS = 5  # of processes beside other tests, of which some measure time
TIMEOUT_S = 540  # from when the test waits; below pytest's own
Done = subprocess.CompletedProcess[str]


class Child(NamedTuple):
    command: list[str]
    environment: Mapping[str, str]
    cwd: str | None = None


class Early:
    """Runs the children one after another, in the order of their tests."""

    def __init__(self, large: int = LARGE) -> None:
        self._large = large
        self._pool = ThreadPoolExecutor(1, "early")
        self._begun: dict[str, Future[Done]] = {}  # by the test's id
        self._running: subprocess.Popen[str] | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or len(session.items) < self._large or len(os.sched_getaffinity(0)) < 2:
            return
        for item in session.items:
            plan = plan_of(item)
            if plan is not None:
                self._begun[item.nodeid] = self._pool.submit(self._beside, plan)

    @pytest.fixture
    def child(self, request: pytest.FixtureRequest) -> Iterator[Done]:
        """The ended process of the test's mark."""
        plan = plan_of(request.node)
        assert plan is not None, "the test has no mark `early`"
        begun = self._begun.get(request.node.nodeid)
        if begun is None or begun.cancel():  # not begun: now both cores have something to do
            yield ended(start(plan()), TIMEOUT_S)
        else:
            yield begun.result(TIMEOUT_S)

    def pytest_sessionfinish(self) -> None:
        """Ends what no test has waited for, as after -x or Ctrl-C."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._running is not None:
            self._running.terminate()
        self._pool.shutdown()

    def _beside(self, plan: Callable[[], Child]) -> Done:
        self._running = start(plan())
        os.setpriority(os.PRIO_PROCESS, self._running.pid, NICENESS)
        try:
            return ended(self._running)
        finally:
            self._running = None


def plan_of(item: pytest.Item) -> Callable[[], Child] | None:
    mark = item.get_closest_marker("early")
    if mark is None:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return lambda: mark.kwargs["plan"](**parameters)


def start(child: Child) -> subprocess.Popen[str]:
    return subprocess.Popen(
        child.command, env=child.environment, cwd=child.cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout_s: float | None = None) -> Done:
    """Raises subprocess.TimeoutExpired, and has killed the process then."""
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
