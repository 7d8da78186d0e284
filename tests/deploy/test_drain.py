"""What a stop does, in which order, and how long it waits: a process that sleeps stands for tritonserver."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy import drain
from deploy.drain import ServerStop
from deploy.health import Report
from deploy.processes import Process

ENDS_WHEN_ASKED = "import time; print(flush=True); time.sleep(600)"
DOES_NOT_END = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + ENDS_WHEN_ASKED
STUB, OTHER = Process(71, 1), Process(72, 1)


class Script:
    """The signs of a stub that is asked again and again: one answer for each look, the last one for all after it."""

    def __init__(self, steps: list[list[Report]]) -> None:
        self.steps, self.looks = steps, 0

    def look(self) -> list[Report]:
        self.looks += 1
        return self.steps[min(self.looks, len(self.steps)) - 1]


class Stop:
    """One drain of such a process. `done`: what it did, in order."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        self.done: list[str] = []
        self.log = tmp_path / "server.log"
        self.log.touch()
        self.process = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline()
        self.cancelled = False
        ended = self.process.send_signal

        def send(number: int) -> None:
            self.done.append(f"server {signal.Signals(number).name}")
            ended(number)

        monkeypatch.setattr(self.process, "send_signal", send)
        monkeypatch.setattr(drain, "stubs_of", lambda pid: [STUB, OTHER])
        monkeypatch.setattr(drain, "catches", lambda pid, number: pid == STUB.pid)
        monkeypatch.setattr(drain, "read_stat", lambda pid: None if pid == OTHER.pid else "it lives")
        monkeypatch.setattr(
            drain, "send_signal", lambda stub, number: self.done.append(f"{stub.pid} {signal.Signals(number).name}")
        )
        monkeypatch.setattr(drain.doors, "closing", self.closing)
        monkeypatch.setattr(drain, "LINGER_S", 0.02)
        monkeypatch.setattr(drain, "LAST_WORDS_S", 0.05)
        monkeypatch.setattr(drain, "UNLOAD_S", 0.3)
        monkeypatch.setattr(drain, "FOLLOWERS_S", 0.05)

    @contextmanager
    def closing(self, pid: int, port: int) -> Iterator[bool]:
        self.done.append(f"{port} closes")
        yield True
        self.done.append(f"{port} closed")

    def run(self, steps: list[list[Report]], timeout_s: float, num_models: int = 1) -> float:
        """Returns the seconds that it took."""
        script = Script(steps)
        began = time.monotonic()
        ServerStop(
            self.process,
            "no such run",
            8001,
            script,
            num_models,
            self.log,
            lambda: self.cancelled,  # type: ignore[arg-type]
        ).run(timeout_s)
        return time.monotonic() - began


@pytest.fixture
def stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stop]:
    made = Stop(tmp_path, monkeypatch, DOES_NOT_END)
    yield made
    made.process.kill()
    made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def busy(pid: int = STUB.pid, model: str = "a") -> Report:
    return Report(model, "draining", pid, 1)


def done(pid: int = STUB.pid, model: str = "a") -> Report:
    return Report(model, "draining", pid, 0)


def test_newcomers_go_elsewhere_before_the_server_and_the_stubs_refuse_them(stop: Stop) -> None:
    stop.run([[done()]], 60)
    assert stop.done == ["8001 closes", "8001 closed", "server SIGTERM", "71 SIGUSR1"], (
        "72 would be killed by the signal"
    )


def test_a_server_that_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(tmp_path, monkeypatch, ENDS_WHEN_ASKED)
    assert stop.run([[busy()]], 60) < 30
    assert stop.process.wait() == -signal.SIGTERM
    assert stop.process.stdout is not None
    stop.process.stdout.close()


def test_streams_that_the_stubs_know_of_have_the_whole_exit_timeout(stop: Stop) -> None:
    assert stop.run([[busy()]], 1.0) >= 1.0 + drain.LAST_WORDS_S + drain.UNLOAD_S
    assert stop.run([[Report("a", "ready", STUB.pid, 0)]], 1.0) >= 1.0, "it has not heard of the drain yet"


def test_once_all_is_answered_the_server_has_the_time_to_unload_and_no_more(stop: Stop) -> None:
    assert drain.UNLOAD_S <= stop.run([[busy()], [busy()], [done()]], 600) < 300


def test_a_stub_that_has_died_is_not_waited_for(stop: Stop) -> None:
    assert stop.run([[done(), busy(OTHER.pid, "b")]], 600, num_models=2) < 300


def test_of_a_model_that_gives_no_signs_only_triton_can_say_that_it_is_done(stop: Stop) -> None:
    assert stop.run([[done()]], 1.0, num_models=2) >= 1.0
    stop.log.write_text('I1123 server.cc:336] "All models are stopped, unloading models"\n')
    assert stop.run([[done()]], 600, num_models=2) < 300


def test_a_second_ctrl_c_ends_the_wait(stop: Stop) -> None:
    stop.cancelled = True
    assert stop.run([[busy()]], 600) < 300
