"""From the files that stubs leave to a verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from backend.serving.environment import RunDirectory
from deploy import health, probe

SECOND = 1_000_000_000
NOW = 1000 * SECOND


def leave(directory: Path, model: str, state: str = "ready", age_s: float = 0.0, now_ns: int = NOW) -> None:
    directory.mkdir(exist_ok=True)
    sign = {"state": state, "pid": 4711, "at_ns": now_ns - int(age_s * SECOND)}
    (directory / model).write_text(json.dumps(sign))


def test_what_a_stub_writes_is_what_the_launcher_reads(tmp_path: Path) -> None:
    RunDirectory(tmp_path).report_health("ensemble", "ready")
    (report,) = health.read(tmp_path / "health", time.monotonic_ns())
    assert (report.model, report.state) == ("ensemble", "ready")
    assert 0 <= report.age_s < 60
    assert health.judge([report]).unready is None


def test_fresh_and_ready_models_are_well_and_so_is_a_server_whose_models_say_nothing(tmp_path: Path) -> None:
    assert health.judge(health.read(tmp_path / "none", NOW)) == health.Verdict()
    leave(tmp_path, "a", age_s=health.SILENT_S)
    leave(tmp_path, "b")
    assert health.judge(health.read(tmp_path, NOW)) == health.Verdict()


@pytest.mark.parametrize("state", ["unavailable", "draining", "given_up"])
def test_one_model_that_is_not_ready_makes_the_server_not_ready(tmp_path: Path, state: str) -> None:
    leave(tmp_path, "a")
    leave(tmp_path, "b", state)
    verdict = health.judge(health.read(tmp_path, NOW))
    assert verdict.unready == f"model b is {state}"
    assert verdict.given_up == ("b" if state == "given_up" else None)


def test_a_model_that_was_unloaded_is_missed_by_nobody(tmp_path: Path) -> None:
    leave(tmp_path, "a")
    leave(tmp_path, "b", "unloaded", age_s=99)
    assert health.judge(health.read(tmp_path, NOW)) == health.Verdict()
    assert health.unloaded(tmp_path) == {4711}


def test_a_stub_that_missed_three_signs_is_silent_and_the_longest_silence_is_named(tmp_path: Path) -> None:
    leave(tmp_path, "a", age_s=1.6)
    assert (
        health.judge(health.read(tmp_path, NOW)).unready == "the stub of model a (pid 4711) has been silent for 1.6 s"
    )
    leave(tmp_path, "b", age_s=70.0)
    verdict = health.judge(health.read(tmp_path, NOW))
    assert verdict.unready == "the stub of model b (pid 4711) has been silent for 70.0 s"
    assert verdict.silent is not None and verdict.silent.age_s == 70.0


def test_files_that_are_no_signs_are_left_out_and_one_that_is_being_written_too(tmp_path: Path) -> None:
    leave(tmp_path, ".b.new", "given_up")
    for name, text in (("empty", ""), ("list", "[]"), ("part", '{"state": "given_up"}')):
        (tmp_path / name).write_text(text)
    assert health.read(tmp_path, NOW) == []


def test_a_former_servers_signs_are_removed(tmp_path: Path) -> None:
    leave(tmp_path / "health", "a", "given_up")
    health.clear(tmp_path / "health")
    health.clear(tmp_path / "health")
    assert health.read(tmp_path / "health", NOW) == []


def test_the_containers_check_asks_readiness_and_the_signs_but_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(url: str, method: str, path: str, **_: object) -> tuple[int, str]:
        asked.append(f"{method} {path}")
        return status, ""

    monkeypatch.setattr(probe, "request", answer)
    status = 200
    assert probe.main(["http://127.0.0.1:1"]) == 0
    leave(tmp_path, "a", now_ns=time.monotonic_ns())
    assert probe.main(["http://127.0.0.1:1", str(tmp_path)]) == 0
    leave(tmp_path, "a", "unavailable", now_ns=time.monotonic_ns())
    assert probe.main(["http://127.0.0.1:1", str(tmp_path)]) == 1
    status = 400
    assert probe.main(["http://127.0.0.1:1"]) == 1
    assert set(asked) == {"GET /v2/health/ready"}
