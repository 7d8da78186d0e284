"""A scripted Triton, and a server of two models over it, for the tests of operations on models."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from backend.api import load_config
from backend.api.config.multi_model import FILE, Notice
from deploy.engine_sets import Engine, EngineSet
from deploy.health import Report
from deploy.model_control import ModelControl
from deploy.models_file import Entry
from deploy.repository import compose
from deploy.shares import Share
from deploy.triton_control import ControlFailed

SHARE = Share(load_config(overrides=["kv_cache.max_tokens=4096"]), 1000)


class ScriptedTriton:
    """Triton's model control and the stubs' signs: a loaded model has a stub; the engine that a client has is read from its
    config.pbtxt, as by Triton.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.stubs: dict[int, Report] = {}
        self.engine_of: dict[str, str] = {}  # what each model has been loaded with
        self.live: dict[int, int] = {}
        self._pid = 0

    def load(self, model: str, timeout_s: float) -> None:
        self.calls.append(f"load {model}")
        if model in self.fails:
            raise ControlFailed(f"load of {model}: no")
        for pid in self._pids(model):
            self._end(pid)
        text = (self.place / "models" / model / "config.pbtxt").read_text()
        self.engine_of[model] = text.partition('key: "engine" value: { string_value: "')[2].partition('"')[0]
        self._pid += 1
        self.stubs[self._pid] = Report(model, "ready", self._pid)

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        for pid in self._pids(model):
            self._end(pid)

    def is_ready(self, model: str) -> bool:
        return bool(self._pids(model))

    def reports(self) -> list[Report]:
        return [with_live(report, self.live.get(pid, 0)) for pid, report in self.stubs.items()]

    def is_alive(self, pid: int) -> bool:
        return self.stubs[pid].state != "unloaded"

    def work(self, model: str, live: int) -> None:
        """The present instance of a model has so many requests."""
        (pid,) = self._pids(model)
        self.live[pid] = live

    def _pids(self, model: str) -> list[int]:
        return [pid for pid, report in self.stubs.items() if report.model == model and report.state != "unloaded"]

    def _end(self, pid: int) -> None:
        self.stubs[pid] = Report(self.stubs[pid].model, "unloaded", pid)


def with_live(report: Report, live: int) -> Report:
    return Report(report.model, report.state, report.pid, live)


class Server:
    """Models `a` (the default one; unloaded when idle for 30 s) and `b`."""

    def __init__(self, place: Path) -> None:
        self.place, self.now = place, 0.0
        self.triton = ScriptedTriton(place)
        models = compose(("vllm",))
        self.sets = [
            EngineSet("a", Entry("x", idle_unload_s=30.0), SHARE, models, is_default=True, number=1),
            EngineSet("b", Entry("x"), SHARE, models, is_default=False, number=2),
        ]
        self.free, self.told, self.generates = 1000, [], True
        self.again: Callable[[EngineSet, bool], tuple[Entry, Share]] = lambda each, beside: (each.entry, SHARE)
        for each in self.sets:
            each.engine.lay_out(place)
            each.render(each.models, place / "models")
            for model in each.models:
                self.triton.load(model.name, 1)
        self.triton.calls.clear()
        self.control = ModelControl(
            self.sets,
            self.triton,
            self.triton.reports,
            place,
            lambda each, beside: self.again(each, beside),
            lambda share: self.free,
            self._first_token,
            self.triton.is_alive,
            self.told.append,
            clock=lambda: self.now,
        )

    def _first_token(self, engine: Engine, timeout_s: float) -> None:
        self.triton.calls.append(f"token {engine.owner}")
        if not self.generates:
            raise ControlFailed("the new engine does not generate")

    def state(self, name: str) -> str:
        (each,) = [each for each in self.control.described() if each.name == name]
        return each.state

    def notice(self, engine: int) -> Notice | None:
        path = self.place / f"e{engine}" / FILE
        return msgspec.json.decode(path.read_bytes(), type=Notice) if path.is_file() else None

    def settle(self) -> None:
        """One look, and the end of all that it has begun."""
        self.control.look()
        deadline = time.monotonic() + 60
        while any(each.operation for each in self.control.described()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
