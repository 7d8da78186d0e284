"""From the signs of life of the stubs to a verdict."""

from __future__ import annotations

import pytest

from deploy import health, probe
from deploy.health import Report


def report(
    model: str = "a", state: str = "ready", pid: int = 4711, live: int = 0, silent_s: float = 0.0, busy: bool = False
) -> Report:
    return Report(model, state, pid, live, silent_s, busy)


def test_fresh_and_ready_models_are_well_and_so_is_a_server_whose_models_say_nothing() -> None:
    assert health.judge([]) == health.Verdict()
    assert health.judge([report(silent_s=1.0), report("b")]) == health.Verdict()


@pytest.mark.parametrize("state", ["unavailable", "draining", "given_up"])
def test_one_model_that_is_not_ready_makes_the_server_not_ready(state: str) -> None:
    verdict = health.judge([report(), report("b", state)])
    assert verdict.unready == f"model b is {state}"
    assert verdict.given_up == ("b" if state == "given_up" else None)


def test_a_stub_whose_model_was_unloaded_is_missed_by_nobody() -> None:
    assert health.judge([report(), report("b", "unloaded", silent_s=99)]) == health.Verdict()


def test_a_stub_that_missed_five_signs_is_silent_and_the_longest_silence_is_named() -> None:
    short, long = report(silent_s=1.25), report("b", pid=12, silent_s=70.0)
    assert health.judge([short]).unready == "the stub of model a (pid 4711) has been silent for 1.2 s"
    verdict = health.judge([short, long])
    assert verdict.unready == "the stub of model b (pid 12) has been silent for 70.0 s"
    assert verdict.silent == long


def test_a_stub_that_works_is_slow_for_ten_seconds_before_it_is_silent() -> None:
    assert health.judge([report(silent_s=9.75, busy=True)]) == health.Verdict()
    assert health.judge([report(silent_s=10.0, busy=True)]).silent is not None


def test_a_server_is_drained_once_every_stub_drains_and_has_answered_everything() -> None:
    done, unloaded = report("a", "draining"), report("b", "unloaded", live=0)
    assert health.drained([done, unloaded]) and health.drained([])
    assert not health.drained([done, report("c", "draining", live=1)])
    assert not health.drained([done, report("c", "ready")]), "it has not heard of the drain yet"


def test_the_containers_check_asks_readiness_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(url: str, method: str, path: str, **_: object) -> tuple[int, str]:
        asked.append(f"{method} {path}")
        return status, ""

    monkeypatch.setattr(probe, "request", answer)
    status = 200
    assert probe.main(["http://127.0.0.1:1"]) == 0
    status = 400
    assert probe.main(["http://127.0.0.1:1"]) == 1
    assert set(asked) == {"GET /v2/health/ready"}
