"""Requests for an engine that is away on purpose: held until it is back, or told why it does not come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineUnavailable, ErrorCode, Overloaded
from backend.api.config.multi_model import FILE, Notice
from backend.serving.lifecycle import absence
from backend.serving.lifecycle.absence import Absence
from backend.serving.server import ModelServer
from tests.serving.helpers import streamed
from tests.serving.scripted import ScriptedExecutor
from tests.serving.test_model_server import eventually


class Held:
    """One request that was offered, and what became of it."""

    def __init__(self, absence: Absence, num_bytes: int = 8) -> None:
        self.events: list[str] = []
        hold = absence.take(num_bytes, lambda: self.events.append("went on"), self._refuse)
        if hold is not None:
            hold()
        self.was_taken = hold is not None

    def _refuse(self, code: ErrorCode, message: str) -> None:
        self.events.append(f"{code.name} {message}")


def tell(path: Path, notice: Notice | None) -> None:
    if notice is None:
        path.unlink()
    else:
        path.write_bytes(msgspec.json.encode(notice))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


def test_nothing_is_held_while_the_engine_is_not_away(path: Path) -> None:
    assert not Held(Absence(path, 2)).was_taken
    assert not Held(Absence(None, 2)).was_taken and Absence(None, 2).notice() is None


def test_held_requests_go_on_once_the_notice_is_gone_and_the_engine_is_there(path: Path) -> None:
    away = Absence(path, 2)
    tell(path, Notice("asleep"))
    held = Held(away)
    assert away.look(is_ready=True) == "" and held.events == [], "the engine is about to end"
    tell(path, None)
    assert away.look(is_ready=False) == "" and held.events == [], "it is not connected yet"
    away.look(is_ready=True)
    away.look(is_ready=True)
    assert held.events == ["went on"]


def test_a_request_is_held_for_so_long_only(path: Path) -> None:
    now = [100.0]
    away = Absence(path, 2, lambda: now[0])
    tell(path, Notice("asleep", hold_s=30))
    held = Held(away)
    now[0] = 129.9
    away.look(is_ready=False)
    assert held.events == []
    now[0] = 130.0
    away.look(is_ready=False)
    assert held.events == ["UNAVAILABLE the model was not loaded in time; send the request again"]


@pytest.mark.parametrize("state", ["unloaded", "failed"])
def test_where_it_does_not_come_back_old_and_new_requests_are_told_why(state: str, path: Path) -> None:
    away = Absence(path, 2)
    tell(path, Notice("asleep"))
    held = Held(away)
    tell(path, Notice(state, "an operator has unloaded it"))
    assert away.look(is_ready=True) == "an operator has unloaded it"
    assert held.events == ["UNAVAILABLE an operator has unloaded it"]
    with pytest.raises(EngineUnavailable, match="an operator has unloaded it"):
        Held(away)


def test_held_requests_are_bounded_in_number_and_in_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(path, Notice("asleep"))
    few = Absence(path, 2)
    assert Held(few).was_taken and Held(few).was_taken
    with pytest.raises(Overloaded, match=r"2 requests wait for the model to be loaded, the limit is 2 \(limits"):
        Held(few)
    monkeypatch.setattr(absence, "MAX_BYTES", 100)
    small = Absence(path, 9)
    assert Held(small, 60).was_taken
    with pytest.raises(Overloaded, match="hold more than 100 bytes with this one"):
        Held(small, 41)
    assert Held(small, 40).was_taken


def test_a_notice_that_cannot_be_read_holds(path: Path) -> None:
    path.write_text("junk")
    assert Absence(path, 2).notice() == Notice("asleep")


def test_a_model_holds_a_request_and_is_ready_meanwhile(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, path: Path
) -> None:
    server = make_server(away_file=path)
    tell(path, Notice("asleep"))
    request = streamed([[1, 2]])
    server.execute([request])
    assert server.is_ready() and server.num_live_streams == 1 and not executor.requests
    tell(path, None)
    assert eventually(lambda: len(executor.requests) == 1)
    executor.end(1, 11)
    assert request.sender.column("output_ids") == [11]


def test_a_model_that_is_unloaded_refuses_with_the_reason(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, path: Path
) -> None:
    server = make_server(away_file=path)
    tell(path, Notice("unloaded", "the model is unloaded"))
    request = streamed([[1, 2]])
    server.execute([request])
    assert request.sender.error() == "[UNAVAILABLE] the model is unloaded" and not executor.requests
