"""A start whose engine is ready and whose log says nothing more is one to try again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy import stuck_start
from deploy.errors import ServerFailed
from deploy.stuck_start import StuckStart
from deploy.triton_server import TritonServer
from tests.deploy.test_triton_server import Installation, installation, server  # noqa: F401 (fixtures)

READY = "2026-11-23 21:53:17,877 engine INFO everbatch.engine: ready in 2.0 s: default, float32 on cpu\n"
AS_JSON = (
    '{"time": "t", "process": "engine", "level": "INFO", "logger": "everbatch.engine", "message": "ready in 2.0 s"}\n'
)


class Time:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Time]:
    monkeypatch.setattr(Time, "now", 0.0)
    monkeypatch.setattr(stuck_start.time, "monotonic", lambda: Time.now)
    return Time


@pytest.mark.parametrize("said, is_stuck", [(READY, True), (AS_JSON, True), ("loading the model\n", False)])
def test_only_a_quiet_log_behind_a_ready_engine_is_a_hang(
    tmp_path: Path, clock: type[Time], said: str, is_stuck: bool
) -> None:
    log = tmp_path / "server.log"
    log.write_text(READY)  # of a former start
    start = StuckStart(log, lambda: False)
    clock.now = 1000.0
    assert not start.look()
    log.write_text(READY + said)
    assert not start.look()
    clock.now += stuck_start.QUIET_S
    assert not start.look()
    clock.now += 1
    assert start.look() is is_stuck
    log.write_text(READY + said + "a line more\n")
    assert not start.look()


def test_a_stub_that_works_is_no_hang(tmp_path: Path, clock: type[Time]) -> None:
    """It may read a large tokenizer; the quiet time counts anew from its latest work."""
    log, busy = tmp_path / "server.log", [True]
    start = StuckStart(log, lambda: busy[0])
    log.write_text(READY)
    start.look()
    clock.now += stuck_start.QUIET_S + 1
    assert not start.look()
    busy[0] = False
    clock.now += stuck_start.QUIET_S
    assert not start.look()
    clock.now += 1
    assert start.look()


def test_a_log_that_is_not_there_yet_is_no_hang(tmp_path: Path, clock: type[Time]) -> None:
    start = StuckStart(tmp_path / "server.log", lambda: False)
    clock.now = 1000.0
    assert not start.look()


def test_a_start_that_hangs_may_be_tried_again(
    installation: Installation,  # noqa: F811
    server: TritonServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stuck_start, "QUIET_S", 0.3)
    program = f"import sys, time\nsys.stderr.write({READY!r})\nsys.stderr.flush()\ntime.sleep(60)"
    installation.binary.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(0.5)\n{program}\n")
    server.start()
    with pytest.raises(ServerFailed, match="hangs while it loads the models, by chance") as failed:
        server.wait_ready(60)
    assert failed.value.by_chance
    server.kill()
