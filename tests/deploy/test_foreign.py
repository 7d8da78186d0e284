"""Models of a repository of the user's own: their stubs, models that cannot be loaded, and those that come later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy import foreign, probe, stubs
from deploy.errors import ServerFailed
from deploy.health import Report
from deploy.processes import Process, model_of_stub
from deploy.readiness import SENTINEL
from deploy.repository import compose, repositories_of
from deploy.signs import Signs
from deploy.stubs import Stubs
from tests.deploy.test_repository import OURS, PBTXT, add_model

ENDED, LIVING = Process(2**22 + 1, 1), Process(os.getpid(), 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with the models `good` and `bad`."""
    for name in ("good", "bad"):
        add_model(tmp_path / "repository", name, 'backend: "python"\n')
    return tmp_path / "repository"


class Life:
    """The stubs of a server: one of model `a` has ended, which has never given a sign."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.living = {ENDED: "a"}
        self.ready: bool | None = True
        self.asked: list[str] = []
        monkeypatch.setattr(stubs, "stubs_of", lambda pid: list(self.living))
        monkeypatch.setattr(
            stubs, "model_of_stub", lambda pid: {each.pid: model for each, model in self.living.items()}[pid]
        )
        self.signs = Signs(directory / "pipe")
        self.stubs = Stubs(1, self.is_ready)
        self.stubs.take_in()
        self.living = {}

    def is_ready(self, model: str) -> bool | None:
        self.asked.append(model)
        return self.ready

    def dead(self) -> list[Process]:
        return self.stubs.dead(self.signs, is_watched=False)


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(tmp_path, monkeypatch)


def test_a_stub_whose_model_triton_takes_for_ready_is_missed(life: Life) -> None:
    assert life.dead() == [ENDED] and life.dead() == [ENDED]


def test_a_stub_whose_model_was_unloaded_is_not_missed_nor_asked_for_again(life: Life) -> None:
    life.ready = False
    assert life.dead() == [] and life.dead() == [] and life.asked == ["a"]


def test_a_stub_is_judged_when_triton_answers(life: Life) -> None:
    life.ready = None
    assert life.dead() == []
    life.ready = True
    assert life.dead() == [ENDED]


def test_a_stub_whose_model_was_loaded_anew_is_not_missed_and_its_successor_is(life: Life) -> None:
    successor = Process(2**22 + 2, 1)
    life.living = {successor: "a"}
    assert life.dead() == [] and life.asked == []
    life.living = {}
    assert life.dead() == [successor]


def test_a_stub_that_gave_signs_is_missed_whatever_triton_says(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is asked to unload a model of ours: its stub says so, or it has died."""
    life.ready = False
    monkeypatch.setattr(life.signs, "_take", lambda: {ENDED.pid: Report("a", "ready", ENDED.pid)})
    life.signs.look()
    assert life.dead() == [ENDED] and life.asked == []


@pytest.mark.parametrize(
    "program, model",
    [
        (["stub", "/r/models/good/1/model.py", "x"], "good"),
        (["stub", "/a b/é/12/m.py"], "é"),
        (["stub", "/backends/vllm/model.py"], ""),
        (["stub"], ""),
    ],
)
def test_the_model_of_a_stub_is_read_from_its_arguments(program: list[str], model: str) -> None:
    raw = "\0".join([*program, ""]).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.processes._read_proc", lambda pid, name: raw if name == "cmdline" else b"")
        assert model_of_stub(7) == model


class Triton:
    """The index of a server, its readiness, and what it was asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **reasons: str) -> None:
        self.reasons = {"good": "", **reasons}  # "": the model serves
        self.calls: list[str] = []
        monkeypatch.setattr(probe, "request", self.request)

    def request(
        self,
        url: str,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        if path == "/v2/health/ready":
            return (200 if set(self.reasons.values()) <= {"", "unloaded"} else 400), ""
        if path == "/v2/repository/index":
            told = [
                {"name": name, "state": "UNAVAILABLE" if why else "READY", "reason": why}
                for name, why in self.reasons.items()
            ]
            return 200, json.dumps(told)
        *_, name, action = path.split("/")
        if action == "ready":
            return (200 if self.reasons.get(name) == "" else 400), ""
        if action == "config":
            tensor = {"name": "x", "data_type": "TYPE_INT32", "dims": [1]}
            return 200, json.dumps({"input": [tensor], "output": [tensor], "max_batch_size": 0})
        self.calls.append(f"{action} {name}")
        self.reasons[name] = "unloaded" if action == "unload" else ""
        return 200, ""


def leave_out(source: Path, *profiles: str) -> list[str]:
    told: list[str] = []
    foreign.leave_out_broken(compose(profiles, [source]), "http://x", "key", source / "log", told.append)
    return told


def test_a_model_that_cannot_be_loaded_does_not_stop_the_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton(monkeypatch, bad="Internal: RuntimeError: no\n\nAt:\n  /r/bad/1/model.py(1): <module>\n")
    assert leave_out(source) == [
        "model bad cannot be loaded: Internal: RuntimeError: no; the other models are served without it"
    ]
    assert triton.calls == ["load bad", "unload bad"] and leave_out(source) == []


def test_a_server_without_a_model_that_serves_has_failed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Triton(monkeypatch, good="no", bad="no")
    with pytest.raises(ServerFailed, match="cannot be loaded: no"):
        leave_out(source)


def test_a_model_of_ours_that_cannot_be_loaded_stops_the_server(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Triton(monkeypatch, bad="no", everbatch="Internal: ConfigError: no such device")
    with pytest.raises(ServerFailed, match="model everbatch cannot be loaded: Internal: ConfigError: no such device"):
        leave_out(source, "trtllm")


def test_a_model_that_comes_later_and_cannot_be_loaded_is_forgotten(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, told = compose((), [source]), list[str]()
    triton = Triton(monkeypatch, late="no", ours="no", **{SENTINEL: "no"})
    add_model(source, "late", 'backend: "python"\n')
    foreign.forget_broken(models, "http://x", "key", told.append)
    assert told == ["model late cannot be loaded: no; the other models are served without it"]
    assert triton.calls == ["load late", "unload late"], "what is not of that repository is left alone"


def test_a_repository_without_clients_of_the_engine_is_read_where_it_lies(source: Path, tmp_path: Path) -> None:
    """So a model that is put there later can be loaded."""
    both = repositories_of(compose(("trtllm",), [source]), tmp_path / "models", decoupled=True)
    assert both[1:] == [source] and (both[0] / "everbatch").exists() and not (both[0] / "good").exists()
    assert repositories_of(compose((), [source]), tmp_path / "models", decoupled=True) == [source]


@pytest.mark.parametrize("text", [OURS.format(name="mine", role="ensemble"), PBTXT])
def test_a_repository_whose_models_are_served_otherwise_is_copied(source: Path, tmp_path: Path, text: str) -> None:
    add_model(source, "mine", text)
    (found,) = repositories_of(compose(("trtllm",), [source]), tmp_path / "models", decoupled=False)
    assert found == tmp_path / "models" and (found / "good").exists()
