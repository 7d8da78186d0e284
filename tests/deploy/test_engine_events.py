"""From the lines that the engine's owner writes to what the console says."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import pytest

from backend.api.config.schema import EngineConfig
from backend.api.processes.setup import JsonLines
from backend.executor import engine_supervisor
from deploy import engine_events
from deploy.engine_events import EngineEvents

OWNER = "2026-11-20 21:25:24,216 tensorrt_llm ERROR everbatch.supervisor: "
KILLED = OWNER + "the engine process ended with code -9; it is started again in 0.5 s\n"


def write(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(KILLED)
    return path


def test_an_end_of_the_engine_is_told_once_with_its_signal(log: Path) -> None:
    events = EngineEvents(log)
    assert events.fresh() == [], "what was there before is of another life"
    write(log, "noise\n" + KILLED)
    assert events.fresh() == ["the engine process was ended by signal 9 (SIGKILL); it is started again in 0.5 s"]
    assert events.fresh() == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "the engine process ended with code 3; it is started",
            "the engine process ended with exit status 3; it is started",
        ),
        ("the engine process 77 gave no sign; it is killed", "the engine process 77 gave no sign; it is killed"),
        ("replica 1 ended with code -9; it is started", "replica 1 was ended by signal 9 (SIGKILL); it is started"),
        ("the engine died 6 times in 3 s and is not", "the engine died 6 times in 3 s and is not"),
    ],
)
def test_exit_statuses_and_giving_up_are_told(log: Path, line: str, told: str) -> None:
    events = EngineEvents(log)
    write(log, f"{OWNER}{line}\n{OWNER}engine: loading torch\nthe engine process of somebody else\n")
    assert events.fresh() == [told]


def test_a_line_that_comes_in_two_parts_is_one_event(log: Path) -> None:
    events = EngineEvents(log)
    write(log, KILLED[:80])
    assert events.fresh() == []
    write(log, KILLED[80:])
    assert len(events.fresh()) == 1


def test_a_log_that_was_emptied_is_read_from_its_beginning(log: Path) -> None:
    events = EngineEvents(log)
    write(log, "more\n" * 100)
    events.fresh()
    log.write_text(KILLED)
    assert len(events.fresh()) == 1


def test_a_log_that_grows_fast_is_not_read_as_a_whole(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "MAX_BYTES", 300)
    events = EngineEvents(log)
    write(log, KILLED + "x" * 1000 + "\n" + KILLED)
    assert len(events.fresh()) == 1
    write(log, "x" * 1000)
    events.fresh()
    assert len(events._rest) == 300


@pytest.mark.parametrize("way", ["emptied", "grown fast"])
def test_half_a_line_and_what_comes_much_later_are_no_event(
    way: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_events, "MAX_BYTES", 300)
    events = EngineEvents(log)
    write(log, OWNER + "the engine process")
    assert events.fresh() == []
    if way == "emptied":
        log.write_text(" and so on\n" + KILLED)
    else:
        write(log, "\n" + " " * 1000 + "and so on\n" + KILLED)
    assert events.fresh() == ["the engine process was ended by signal 9 (SIGKILL); it is started again in 0.5 s"]


def test_a_log_that_is_removed_while_it_is_looked_at_ends_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = EngineEvents(log)
    monkeypatch.setattr(events, "_size", lambda: 10_000)  # the file was there when its size was asked for
    log.unlink()
    assert events.fresh() == []


def test_there_may_be_no_log_yet(tmp_path: Path) -> None:
    events = EngineEvents(tmp_path / "server.log")
    assert events.fresh() == []
    write(tmp_path / "server.log", KILLED)
    assert len(events.fresh()) == 1


def test_what_the_engines_owner_logs_is_what_is_told(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner itself, with a process in the engine's place that is ready and then ends with status 3."""
    engine = log.with_name("engine")
    engine.write_text(f'#!{sys.executable}\nprint(\'{{"ready": ""}}\', flush=True)\nraise SystemExit(3)\n')
    engine.chmod(0o700)
    monkeypatch.setenv("EVERBATCH_PYTHON", str(engine))
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s tensorrt_llm %(levelname)s %(name)s: %(message)s"))
    events, told = EngineEvents(log), []
    engine_supervisor.log.addHandler(handler)
    owner = engine_supervisor.EngineProcess(EngineConfig(), str(log.with_name("engine.sock")))
    try:
        owner.start(30)
        deadline = time.monotonic() + 30
        while not (told := events.fresh()):
            assert time.monotonic() < deadline, "no end was told within 30 s"
            time.sleep(0.01)
    finally:
        owner.stop()
        engine_supervisor.log.removeHandler(handler)
        handler.close()
    assert told[0].startswith("the engine process ended with exit status 3; it is started again in ")


def test_an_end_is_told_from_json_lines_too(log: Path) -> None:
    events = EngineEvents(log)
    message = "the engine process ended with code -9; it is started again in 0.5 s"
    record = logging.LogRecord("everbatch.supervisor", logging.ERROR, "", 0, message, None, None)
    write(log, JsonLines("tensorrt_llm").format(record) + "\n")
    assert events.fresh() == ["the engine process was ended by signal 9 (SIGKILL); it is started again in 0.5 s"]
