"""Who is not well makes the server say so, and who stays unwell ends it; and how Triton is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy import monitor as monitor_module
from deploy.health import Report
from deploy.monitor import Monitor
from deploy.probe import ProbeFailed
from deploy.processes import Process
from deploy.readiness import SENTINEL, Readiness


class Told:
    """A Readiness that remembers what it was told, and wakes who waits for it."""

    def __init__(self) -> None:
        self.told_ready = True
        self.refuse = False
        self.history: list[bool] = []

    def tell(self, ready: bool) -> None:
        if self.refuse:
            raise ProbeFailed("no answer")
        if ready != self.told_ready:
            self.history.append(ready)
        self.told_ready = ready


class Given:
    """Signs that a test gives by hand."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.error: Exception | None = None
        self.looks = 0

    def look(self) -> list[Report]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.reports


class Watched:
    """A monitor without a server: its clock goes fast, and `live` says whether tritonserver answers."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, watchdog_s: float = 60.0) -> None:
        monkeypatch.setattr(monitor_module, "TICK_S", 0.005)
        monkeypatch.setattr(monitor_module, "LIVE_EVERY_S", 0.005)
        monkeypatch.setattr(monitor_module.probe, "is_live", lambda url, timeout_s: self.live)
        self.live = True
        self.events: list[str] = []
        self.told = Told()
        self.dead: list[Process] = []
        self.log = directory / "server.log"
        self.log.touch()
        self.signs = Given()
        self.monitor = Monitor(
            "http://127.0.0.1:1",
            self.signs,  # type: ignore[arg-type]
            self.log,
            self.told,  # type: ignore[arg-type]
            lambda: self.dead,
            watchdog_s,
            self.events.append,
        )
        self.monitor.start()

    def sign(self, state: str, silent_s: float = 0.0) -> None:
        self.signs.reports = [Report("a", state, 1, silent_s=silent_s)]

    def until(self, condition: Callable[[], object], sign: str | None = None) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 30 s"
            if sign is not None:
                self.sign(sign)
            time.sleep(0.002)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(tmp_path, monkeypatch)
    yield made
    made.monitor.stop()


def test_readiness_follows_the_signs_of_life(watched: Watched) -> None:
    watched.until(lambda: not watched.told.told_ready, sign="unavailable")
    watched.until(lambda: watched.told.told_ready, sign="ready")
    watched.sign("ready", silent_s=1.25)
    watched.until(lambda: not watched.told.told_ready)
    assert watched.told.history == [False, True, False]
    assert watched.monitor.failure() is None


def test_a_dead_stub_makes_the_server_not_ready(watched: Watched) -> None:
    watched.dead.append(Process(77, 1))
    watched.until(lambda: not watched.told.told_ready)


def test_what_the_server_did_not_take_is_told_again(watched: Watched) -> None:
    watched.told.refuse = True
    watched.sign("unavailable")
    asked = watched.told.history
    looks = watched.signs.looks
    watched.until(lambda: watched.signs.looks > looks + 2)
    watched.told.refuse = False
    watched.until(lambda: asked == [False], sign="unavailable")
    refusals = lambda: sum("the server was not told" in event for event in watched.events)
    assert refusals() == 1
    watched.told.refuse = True
    watched.until(lambda: refusals() == 2, sign="ready")
    watched.told.refuse = False
    watched.until(lambda: asked == [False, True], sign="ready")


def test_an_engine_that_was_given_up_is_a_final_failure(watched: Watched) -> None:
    watched.until(lambda: watched.monitor.failure() is not None, sign="given_up")
    failure = watched.monitor.failure()
    assert failure is not None and failure.final and "model a" in failure.text
    assert f"the log is {watched.log}" in failure.text


def test_an_end_of_the_engine_is_told_with_its_signal_and_the_log(watched: Watched) -> None:
    with watched.log.open("a") as log:
        log.write("ERROR everbatch.supervisor: the engine process ended with code -11; it is started again in 0.5 s\n")
    watched.until(lambda: watched.events, sign="ready")
    assert watched.events[0] == (
        f"the engine process was ended by signal 11 (SIGSEGV); it is started again in 0.5 s; the log is {watched.log}"
    )


def test_the_errors_by_which_the_server_is_made_not_ready_are_explained_in_its_log(watched: Watched) -> None:
    watched.until(lambda: not watched.told.told_ready, sign="unavailable")
    watched.until(lambda: watched.told.told_ready, sign="ready")
    watched.until(lambda: "ready again" in watched.events, sign="ready")
    assert watched.events == ["not ready: model a is unavailable", "ready again"]
    assert watched.log.read_text().count(f"model {SENTINEL} are intended") == 1


def test_a_stub_that_is_silent_for_longer_than_the_watchdog_is_a_failure(watched: Watched) -> None:
    watched.sign("ready", silent_s=30)
    watched.until(lambda: not watched.told.told_ready)
    assert watched.monitor.failure() is None
    watched.sign("ready", silent_s=61)
    watched.until(lambda: watched.monitor.failure() is not None)
    failure = watched.monitor.failure()
    assert failure is not None and not failure.final
    assert "stub of model a" in failure.text and "triton.watchdog_timeout_s" in failure.text


def test_a_tritonserver_that_does_not_answer_for_longer_than_the_watchdog_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch, watchdog_s=0.5)
    try:
        watched.until(lambda: watched.monitor.failure() is None)
        watched.live = False
        watched.until(lambda: watched.monitor.failure() is not None)
        failure = watched.monitor.failure()
        assert failure is not None and "tritonserver has not answered" in failure.text
        watched.sign("ready", silent_s=60)  # a stub that waits for this server has fallen silent, too
        time.sleep(0.5)
        failure = watched.monitor.failure()
        assert failure is not None and "tritonserver has not answered" in failure.text
        watched.sign("ready")
        watched.live = True
        watched.until(lambda: watched.monitor.failure() is None)
    finally:
        watched.monitor.stop()


def test_a_log_that_grows_too_long_is_put_aside(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module.log_files, "limit_bytes", lambda path: 10)
    log = watched.log.parent / "server.log"
    log.write_text("more than ten bytes")
    watched.until(lambda: log.stat().st_size == 0)
    assert log.with_name("server.log.1").read_text() == "more than ten bytes"


def test_a_stop_of_the_launcher_itself_is_no_silence_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that takes far longer than it was asked to: SIGSTOP, or a machine that slept. The clock is the test's."""
    watched = Watched(tmp_path, monkeypatch)
    watched.monitor.stop()
    watched.monitor._end.clear()
    monkeypatch.setattr(watched.monitor._thread, "is_alive", lambda: True)
    now = [time.monotonic()]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> bool:
        now[0] += seconds
        return False

    watched.live = False
    monkeypatch.setattr(watched.monitor._end, "wait", lambda timeout: sleep(100.0))
    watched.monitor._wait()
    watched.monitor._look_after_server()
    assert watched.monitor.failure() is None
    monkeypatch.setattr(watched.monitor._end, "wait", sleep)
    for _ in range(61):
        sleep(1.0)
        watched.monitor._wait()
        watched.monitor._look_after_server()
    assert watched.monitor.failure() is not None, "still silent: now it counts"


def test_what_fails_in_a_look_is_told_once_and_the_watch_goes_on(watched: Watched) -> None:
    watched.signs.error = OSError(28, "No space left on device")
    watched.until(lambda: watched.events)
    looks = watched.signs.looks
    watched.live = False
    watched.until(lambda: watched.signs.looks > looks + 3)
    watched.signs.error = None
    watched.until(lambda: not watched.told.told_ready, sign="unavailable")
    assert watched.monitor.failure() is None
    told = "watching the server failed: OSError: [Errno 28] No space left on device"
    assert [event for event in watched.events if "No space" in event] == [told]
    watched.signs.error = OSError(28, "No space left on device")
    watched.until(lambda: watched.events.count(told) == 2)


def test_a_console_that_is_gone_does_not_end_the_watch(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        watched.events.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(watched.monitor, "_tell_user", refuse)
    watched.until(lambda: watched.events, sign="unavailable")
    watched.until(lambda: watched.told.told_ready, sign="ready")
    assert watched.monitor.failure() is None


def test_a_watch_that_ended_by_itself_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "_run", lambda self: None)
    watched = Watched(tmp_path, monkeypatch)
    watched.until(lambda: watched.monitor.failure() is not None)
    failure = watched.monitor.failure()
    assert failure is not None and "thread that watches" in failure.text and not failure.final
    watched.monitor.stop()
    assert watched.monitor.failure() is None


def test_a_full_disk_is_told_once_and_told_again_when_it_comes_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[str | None] = ["no space is left for the log"] * 3 + [None] + ["no space is left for the log"] * 3
    told = iter(troubles)
    looked = []

    def look_after(path: Path) -> str | None:
        if path != watched.log:  # The monitor of a server that other tests of this process share
            return None
        looked.append(path)
        return next(told, None)

    monkeypatch.setattr(monitor_module.log_files, "look_after", look_after)
    watched.until(lambda: len(looked) > len(troubles), sign="ready")
    assert watched.events == ["no space is left for the log"] * 2
    assert watched.monitor.failure() is None


class Triton(BaseHTTPRequestHandler):
    """Answers as tritonserver 24.10 does: loads of an unknown backend fail, and a model's last load decides."""

    requests: list[tuple[str, str | None, dict]] = []
    failing = False

    def do_GET(self) -> None:
        tensor = {"name": "x", "data_type": "TYPE_INT32", "dims": ["1"]}
        inputs = [{**tensor, "name": "o", "optional": True}, tensor]
        self._answer(200, {"max_batch_size": 4, "input": inputs, "output": [{**tensor, "name": "y"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append((self.path, self.headers["x-everbatch-admin"], body))
        broken = "config" in body["parameters"] and "backend" in json.loads(body["parameters"]["config"])
        self._answer(503 if self.failing else 400 if broken else 200, {})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def triton() -> Iterator[tuple[str, type[Triton]]]:
    handler = type("Handler", (Triton,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_not_ready_is_a_load_that_fails_and_ready_one_that_succeeds_and_is_undone(
    triton: tuple[str, type[Triton]],
) -> None:
    url, handler = triton
    readiness = Readiness(url, "key", "ensemble")
    for ready in (True, False, False, True, True):
        readiness.tell(ready)
    paths = [path.removeprefix(f"/v2/repository/models/{SENTINEL}/") for path, _, _ in handler.requests]
    assert paths == ["load", "load", "unload"]
    assert {key for _, key, _ in handler.requests} == {"key"}
    ensemble = json.loads(handler.requests[1][2]["parameters"]["config"])
    assert ensemble["ensemble_scheduling"]["step"][0]["input_map"] == {"x": "x"}, "optional inputs are left out"


def test_a_server_that_does_not_take_it_is_still_what_it_was(triton: tuple[str, type[Triton]]) -> None:
    url, handler = triton
    handler.failing = True
    readiness = Readiness(url, "key", "ensemble")
    with pytest.raises(ProbeFailed, match="503"):
        readiness.tell(False)
    assert readiness.told_ready
    handler.failing = False
    readiness.tell(False)
    assert not readiness.told_ready
