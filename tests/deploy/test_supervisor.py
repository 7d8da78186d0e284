"""The serve loop against a scripted server: restarts, back-off, giving up, signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from deploy.errors import ServerFailed
from deploy.processes import Process
from deploy.supervisor import FailureWindow, StopSignals, supervise


class ScriptedServer:
    """Each life follows one step of the script: up, stub dies, server dies, does not start."""

    def __init__(self, script: list[str], at_end: Callable[[], None]):
        self.script = script
        self.at_end = at_end
        self.lives = 0
        self.calls: list[str] = []
        self.exit_status: int | None = None

    def start(self) -> None:
        self.calls.append("start")
        self.lives += 1

    def wait_ready(self, timeout_s: float, *, on_phase: Callable[[str], None], cancelled: Callable[[], bool]) -> None:
        if self.step == "does not start":
            raise ServerFailed("it did not start", "the log")

    def running(self) -> bool:
        if self.step == "up":
            self.at_end()
        if self.step == "server dies":
            self.exit_status = -11
            return False
        return True

    def dead_stubs(self) -> list[Process]:
        return [Process(77, 1)] if self.step == "stub dies" else []

    def stop(self, *, cancelled: Callable[[], bool]) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")

    @property
    def step(self) -> str:
        return self.script[min(self.lives, len(self.script)) - 1]


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ready_count = 0

    def phase(self, text: str) -> None: ...

    def ready(self) -> None:
        self.ready_count += 1

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def stopping(self) -> None: ...


class CountedSignals(StopSignals):
    """Signals without waiting: delays are noted instead of slept."""

    def __init__(self) -> None:
        self.count = 0
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def run(script: list[str]) -> tuple[int, ScriptedServer, Recorder, CountedSignals]:
    signals, recorder = CountedSignals(), Recorder()

    def at_end() -> None:
        signals.count = 1

    server = ScriptedServer(script, at_end)
    return supervise(server, recorder, signals, 1.0), server, recorder, signals


def test_a_signal_stops_the_server_and_the_status_is_zero() -> None:
    status, server, recorder, _ = run(["up"])
    assert status == 0
    assert server.calls[:2] == ["start", "stop"]
    assert recorder.ready_count == 1


def test_a_dead_stub_restarts_the_whole_server() -> None:
    status, server, recorder, _ = run(["stub dies", "up"])
    assert status == 0
    assert server.calls[:3] == ["start", "kill", "start"]
    assert recorder.ready_count == 2
    assert "stub process 77 died" in recorder.problems[0]


def test_a_crashed_server_is_started_again() -> None:
    _, server, recorder, _ = run(["server dies", "up"])
    assert server.lives == 2
    assert "status -11" in recorder.problems[0]


def test_the_fifth_failure_within_ten_minutes_ends_with_status_one() -> None:
    status, server, recorder, signals = run(["stub dies"] * 9)
    assert status == 1
    assert server.lives == 5
    assert "giving up" in recorder.problems[-1]
    assert [wait for wait in signals.waits if wait >= 0.5] == [0.5, 1.0, 2.0, 4.0]


def test_a_restart_that_does_not_come_up_counts_as_a_failure() -> None:
    status, server, recorder, _ = run(["stub dies", "does not start", "up"])
    assert status == 0
    assert server.lives == 3
    assert "it did not start" in recorder.problems[1]


def test_a_first_start_that_fails_is_not_tried_again_and_leaves_nothing() -> None:
    server = ScriptedServer(["does not start"], lambda: None)
    with pytest.raises(ServerFailed):
        supervise(server, Recorder(), CountedSignals(), 1.0)
    assert server.calls == ["start", "kill"]


def test_old_failures_are_forgotten() -> None:
    window = FailureWindow(limit=3, window_s=100.0)
    assert [window.add(now) for now in (0.0, 10.0)] == [0.5, 1.0]
    assert window.add(105.0) == 1.0  # the first one is out of the window
    assert window.add(106.0) is None


def test_signals_are_counted_and_end_a_wait() -> None:
    with StopSignals() as signals:
        assert not signals.stop_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(60.0)
        assert signals.stop_asked() and not signals.now_asked()
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(60.0)
        assert signals.now_asked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
