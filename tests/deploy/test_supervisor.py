"""The serve loop against a scripted server: restarts, back-off, giving up, signals."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from deploy.errors import EndReason, ServerFailed
from deploy.supervisor import StopSignals, supervise


class ScriptedServer:
    """Each life follows one step of the script: up, stub dies, does not start, dies by chance, given up."""

    FAILURES = {
        "stub dies": EndReason("stub process 77 died"),
        "server dies": EndReason("tritonserver ended with status -11"),
        "given up": EndReason("the engine of model tensorrt_llm was given up", final=True),
    }

    def __init__(self, script: list[str], at_end: Callable[[], None]) -> None:
        self.script = script
        self.at_end = at_end
        self.lives = 0
        self.calls: list[str] = []
        self.timeouts: list[float] = []

    def start(self) -> None:
        self.calls.append("start")
        self.lives += 1

    def wait_ready(self, timeout_s: float, *, on_phase: Callable[[str], None], cancelled: Callable[[], bool]) -> None:
        self.timeouts.append(timeout_s)
        if self.step == "does not start":
            raise ServerFailed("it did not start", "the log")
        if self.step == "no room":
            raise OSError(28, "No space left on device")
        if self.step == "dies by chance":
            raise ServerFailed("it died", by_chance=True)

    def failure(self) -> EndReason | None:
        if self.step == "up":
            self.at_end()
        return self.FAILURES.get(self.step)

    def stop(self, *, cancelled: Callable[[], bool]) -> None:
        self.calls.append("stop")

    def abandon(self) -> None:
        self.calls.append("abandon")

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


def run(script: list[str], timeout_s: float = 1.0) -> tuple[int, ScriptedServer, Recorder, CountedSignals]:
    signals, recorder = CountedSignals(), Recorder()

    def at_end() -> None:
        signals.count = 1

    server = ScriptedServer(script, at_end)
    return supervise(server, recorder, signals, timeout_s), server, recorder, signals


def test_a_signal_stops_the_server_and_the_status_is_zero() -> None:
    status, server, recorder, _ = run(["up"])
    assert status == 0
    assert server.calls[:2] == ["start", "stop"]
    assert recorder.ready_count == 1


def test_a_dead_stub_restarts_the_whole_server() -> None:
    status, server, recorder, _ = run(["stub dies", "up"])
    assert status == 0
    assert server.calls[:3] == ["start", "abandon", "start"]
    assert recorder.ready_count == 2
    assert "stub process 77 died" in recorder.problems[0]


def test_a_crashed_server_is_started_again() -> None:
    _, server, recorder, _ = run(["server dies", "up"])
    assert server.lives == 2
    assert "status -11" in recorder.problems[0]


def test_a_server_that_was_ready_in_between_is_never_given_up() -> None:
    status, server, recorder, signals = run(["server dies"] * 12 + ["up"])
    assert status == 0
    assert server.lives == 13 and recorder.ready_count == 13
    assert signals.waits[:-1] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0]


def test_the_fifth_failure_since_it_was_ready_ends_with_status_one() -> None:
    status, server, recorder, signals = run(["stub dies"] + ["does not start"] * 9)
    assert status == 1
    assert server.lives == 5
    assert "giving up" in recorder.problems[-1]
    assert server.calls[-1] == "kill"


def test_an_engine_that_was_given_up_ends_everything_at_once_with_status_one() -> None:
    status, server, recorder, signals = run(["given up", "up"])
    assert status == 1
    assert server.lives == 1 and "kill" in server.calls and "stop" not in server.calls
    assert "was given up" in recorder.problems[0]
    assert signals.waits == []


def test_a_restart_gets_a_minute_and_the_first_start_all_the_time_it_was_given() -> None:
    _, server, _, _ = run(["stub dies", "stub dies", "up"], timeout_s=600.0)
    assert server.timeouts == [600.0, 60.0, 60.0]


def test_a_restart_gets_three_times_what_a_slow_first_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.chain([0.0], itertools.repeat(100.0))
    monkeypatch.setattr("deploy.supervisor.time.monotonic", lambda: next(clock))
    assert run(["stub dies", "up"], timeout_s=600.0)[1].timeouts == [600.0, 300.0]
    clock = itertools.chain([0.0], itertools.repeat(100.0))
    assert run(["stub dies", "up"], timeout_s=200.0)[1].timeouts == [200.0, 200.0]


def test_a_first_start_that_died_by_chance_is_tried_twice_more() -> None:
    status, server, recorder, _ = run(["dies by chance", "dies by chance", "up"])
    assert (status, server.lives, recorder.ready_count) == (0, 3, 1)
    server = ScriptedServer(["dies by chance"], lambda: None)
    with pytest.raises(ServerFailed):
        supervise(server, Recorder(), CountedSignals(), 1.0)
    assert server.lives == 3


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


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Python's own handlers: a shell's background job begins with SIGINT ignored, and so does what it starts."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, former, strict=True):
        signal.signal(number, handler)


def test_signals_are_counted_and_end_a_wait(usual_handlers: None) -> None:
    with StopSignals() as signals:
        assert not signals.stop_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(60.0)
        assert signals.stop_asked() and not signals.now_asked()
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(60.0)
        assert signals.now_asked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_a_terminal_or_a_container_stops_the_server(
    number: signal.Signals, usual_handlers: None
) -> None:
    """With another handler than the default for SIGHUP, whose default would end the tests too."""
    with StopSignals() as signals:
        assert signal.getsignal(number) == signals._handle
        os.kill(os.getpid(), number)
        signals.wait(60.0)
        assert signals.stop_asked()
    assert signal.getsignal(number) is signal.default_int_handler


def test_a_restart_for_which_there_is_no_room_is_tried_again() -> None:
    status, server, recorder, _ = run(["stub dies", "no room", "up"])
    assert status == 0 and server.lives == 3
    assert "the server cannot be started: [Errno 28] No space left on device; starting" in recorder.problems[1]


def test_a_first_start_for_which_there_is_no_room_is_one_sentence() -> None:
    with pytest.raises(ServerFailed, match="the server cannot be started: .*No space left on device"):
        run(["no room"])
