"""ModelControl over a scripted Triton: what is loaded, unloaded and written, in which order, and what failures leave."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineConfig, load_config
from backend.api.several import FILE, Notice
from deploy import control_socket, rundir, triton_control
from deploy.control_socket import ControlSocket, answer
from deploy.engine_sets import Engine, EngineSet
from deploy.errors import UserError
from deploy.health import Report
from deploy.model_control import REPLACED, UNLOADED, ModelControl
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


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_the_default_model_has_the_plain_names_and_each_an_engine_of_its_own(server: Server) -> None:
    assert set(server.triton.engine_of) == {
        *("a.engine", "vllm_model", "tensorrt_llm", "everbatch"),
        *("b.engine", "b.vllm_model", "b.tensorrt_llm", "b.everbatch"),
    }
    assert {name: engine for name, engine in server.triton.engine_of.items() if engine == "e1"}.keys() == {
        *("a.engine", "vllm_model", "tensorrt_llm", "everbatch"),
    }
    text = (server.place / "models" / "b.tensorrt_llm" / "config.pbtxt").read_text()
    assert 'name: "b.tensorrt_llm"' in text and 'key: "owns_engine" value: { string_value: "false" }' in text
    text = (server.place / "models" / "b.engine" / "config.pbtxt").read_text()
    assert (
        'key: "metrics_model" value: { string_value: "b" }' in text
        and 'key: "owns_engine" value: { string_value: "tr' in text
    )


def test_an_unloaded_model_refuses_from_the_first_step_on_and_only_its_engine_ends(server: Server) -> None:
    server.control.unload("b")
    assert server.triton.calls == ["unload b.engine"] and server.state("b") == "unloaded"
    assert server.notice(2) == Notice("unloaded", UNLOADED, 600.0) and server.notice(1) is None
    server.control.unload("b")
    assert server.triton.calls == ["unload b.engine"], "it is unloaded already"
    server.triton.work("b.everbatch", 1)
    server.settle()
    assert server.state("b") == "unloaded", "a request does not load what an operator has unloaded"
    memory = {each.name: each.memory_bytes for each in server.control.described()}
    assert memory["a"] > 0 and memory["b"] == 0


def test_a_load_takes_the_model_as_the_file_says_then(server: Server) -> None:
    server.control.unload("b")
    larger = Share(load_config(overrides=["kv_cache.max_tokens=8192"]), 900)
    asked = []
    server.again = lambda each, beside: (asked.append(beside), (Entry("y"), larger))[1]
    server.control.load("b")
    assert set(asked) == {False} and server.state("b") == "loaded"
    assert {server.triton.engine_of[name] for name in ("b.engine-3", "b.vllm_model", "b.everbatch")} == {"e3"}
    assert load_config(server.place / "e3" / "config.json").kv_cache.max_tokens == 8192
    assert not (server.place / "e2").exists() and not (server.place / "models" / "b.engine").exists()
    server.triton.calls.clear()
    server.control.load("b")
    assert server.triton.calls == [], "it is loaded"


def test_a_replacement_moves_the_clients_only_when_the_new_engine_generates(server: Server) -> None:
    server.control.replace("b")
    assert server.triton.calls == [
        *("load b.engine-3", "token b.engine-3"),
        *("load b.vllm_model", "load b.tensorrt_llm", "load b.everbatch"),
        "unload b.engine",
    ]
    assert server.state("b") == "loaded" and server.triton.engine_of["everbatch"] == "e1", "the other model stays"


@pytest.mark.parametrize("failing", ["b.engine-3", "b.everbatch", "token", "memory", "file"])
def test_a_replacement_that_fails_leaves_the_former_engine_serving(failing: str, server: Server) -> None:
    server.generates = failing != "token"
    server.free = 999 if failing == "memory" else 1000
    if failing == "file":
        server.again = lambda each, beside: (_ for _ in ()).throw(UserError("models.json: it is not JSON"))
    if failing == "b.everbatch":  # It fails once, and can be moved back.
        load = server.triton.load

        def fails_once(model: str, timeout_s: float) -> None:
            if model == failing:
                server.triton.load = load  # type: ignore[method-assign]
                raise ControlFailed("no")
            load(model, timeout_s)

        server.triton.load = fails_once  # type: ignore[method-assign]
    server.triton.fails = {failing} - {"b.everbatch"}
    with pytest.raises((ControlFailed, UserError)):
        server.control.replace("b")
    assert server.state("b") == "loaded" and server.triton.is_ready("b.engine")
    assert {server.triton.engine_of[name] for name in ("b.vllm_model", "b.tensorrt_llm", "b.everbatch")} == {"e2"}
    assert not server.triton.is_ready("b.engine-3") and not (server.place / "e3").exists()
    assert not (server.place / "models" / "b.engine-3").exists()


def test_the_former_engine_ends_after_its_last_request(server: Server) -> None:
    """Its stub still has a request when the clients have moved."""
    triton, load = server.triton, server.triton.load
    (former,) = triton._pids("b.everbatch")

    def keeps_the_former(model: str, timeout_s: float) -> None:
        load(model, timeout_s)
        if model == "b.everbatch":
            triton.stubs[former], triton.live[former] = Report(model, "ready", former), 1

    triton.load = keeps_the_former  # type: ignore[method-assign]
    work = threading.Thread(target=server.control.replace, args=("b",))
    work.start()
    deadline = time.monotonic() + 60
    while "load b.everbatch" not in triton.calls and time.monotonic() < deadline:
        time.sleep(0.005)
    for _ in range(3):
        server.control.look()
    assert "unload b.engine" not in triton.calls
    triton.stubs[former], triton.live[former] = Report("b.everbatch", "unloaded", former), 0
    work.join(60)
    assert triton.calls[-1] == "unload b.engine" and former in server.control.retired


def test_requests_of_a_replaced_engine_are_ended_when_they_take_too_long(server: Server) -> None:
    triton, load = server.triton, server.triton.load
    (former,) = triton._pids("b.everbatch")

    def keeps_the_former(model: str, timeout_s: float) -> None:
        load(model, timeout_s)
        if model == "b.everbatch":
            triton.stubs[former], triton.live[former] = Report(model, "ready", former), 1

    triton.load = keeps_the_former  # type: ignore[method-assign]
    notices: list[Notice | None] = []
    unload = triton.unload
    triton.unload = lambda model: (notices.append(server.notice(2)), unload(model))[1]  # type: ignore[method-assign]
    ticking = threading.Event()

    def tick() -> None:
        while not ticking.wait(0.01):
            server.now += 100.0

    clock = threading.Thread(target=tick)
    clock.start()
    try:
        server.control.replace("b")
    finally:
        ticking.set()
        clock.join()
    assert notices == [Notice("unloaded", REPLACED)], "those that are left are told why"
    assert any("drain_timeout_s" in line for line in server.told)


def test_an_idle_model_goes_to_sleep_and_a_request_wakes_it(server: Server) -> None:
    server.now = 29.0
    server.triton.work("everbatch", 1)
    server.settle()
    server.triton.work("everbatch", 0)
    server.now = 58.0
    server.settle()
    assert server.state("a") == "loaded", "29 s after its last request"
    server.now = 59.0
    server.settle()
    assert server.state("a") == "asleep" and server.triton.calls == ["unload a.engine"]
    assert server.notice(1) == Notice("asleep", "", 600.0) and server.state("b") == "loaded"
    server.triton.work("vllm_model", 1)
    server.settle()
    assert server.state("a") == "loaded" and server.triton.calls == ["unload a.engine", "load a.engine"]
    assert server.notice(1) is None and any("loaded after" in line for line in server.told)


def test_a_request_that_comes_as_a_model_goes_to_sleep_keeps_it_awake(server: Server) -> None:
    server.now = 100.0
    tell = server.sets[0].engine.tell

    def comes(place: Path, notice: Notice | None) -> None:
        tell(place, notice)
        server.triton.work("everbatch", 1)

    server.sets[0].engine.tell = comes  # type: ignore[method-assign]
    server.settle()
    assert server.state("a") == "loaded" and server.triton.calls == [] and server.notice(1) is None


def test_a_model_that_cannot_be_loaded_again_says_so_to_those_who_wait(server: Server) -> None:
    server.now = 100.0
    server.settle()
    server.triton.fails = {"a.engine"}
    server.triton.work("everbatch", 1)
    server.settle()
    notice = server.notice(1)
    assert server.state("a") == "failed" and notice is not None and notice.state == "failed"
    assert notice.why == "the model could not be loaded; ask an operator to load it", "clients get no text of Triton's"
    (described, _) = server.control.described()
    assert described.why == "load of a.engine: no"


def test_memory_that_went_meanwhile_keeps_a_model_from_waking(server: Server) -> None:
    server.now = 100.0
    server.settle()
    server.free = 999
    server.triton.work("everbatch", 1)
    server.settle()
    assert server.state("a") == "failed" and server.triton.calls == ["unload a.engine"]


def test_tritons_own_model_control_is_followed(server: Server) -> None:
    server.triton.unload("b.engine")
    server.settle()
    assert server.state("b") == "unloaded" and server.notice(2) == Notice("unloaded", UNLOADED)
    server.triton.load("b.engine", 1)
    server.settle()
    assert server.state("b") == "loaded" and server.notice(2) is None


def test_an_engine_that_is_given_up_is_this_models_failure_only(server: Server) -> None:
    (pid,) = server.triton._pids("b.engine")
    server.triton.stubs[pid] = Report("b.engine", "given_up", pid)
    server.settle()
    assert server.state("b") == "failed" and server.state("a") == "loaded"
    assert server.triton.calls == ["unload b.engine"]


def test_an_unknown_model_is_one_sentence_with_those_that_there_are(server: Server) -> None:
    with pytest.raises(UserError, match="there is no model 'c'; there are a, b"):
        server.control.load("c")


@pytest.fixture
def listening(server: Server, tmp_path: Path) -> Iterator[Path]:
    control = ControlSocket(tmp_path / "control.sock", server.control)
    yield tmp_path / "control.sock"
    control.close()


def test_the_socket_answers_with_the_models_and_is_for_this_user_alone(server: Server, listening: Path) -> None:
    assert listening.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(listening))
        asked.sendall(b'{"operation": "unload", "model": "b"}\n')
        told = msgspec.json.decode(asked.makefile("rb").readline())
    assert told["error"] == "" and [each["state"] for each in told["models"]] == ["loaded", "unloaded"]


def test_operations_that_come_all_at_once_wait_to_be_accepted(
    server: Server, listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher takes none of them in for a while. A connection that does not block is not told to wait in line."""
    may_go_on, handle = threading.Event(), control_socket._Server.process_request

    def slow(self: control_socket._Server, *connection: object) -> None:
        may_go_on.wait(20)
        handle(self, *connection)

    monkeypatch.setattr(control_socket._Server, "process_request", slow)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for each in connections:
        each.setblocking(False)
        assert each.connect_ex(str(listening)) == 0
    may_go_on.set()
    for each in connections:
        each.settimeout(20)
        each.sendall(b'{"operation": "list"}\n')
        with each, each.makefile("rb") as answered:
            assert [one["name"] for one in msgspec.json.decode(answered.readline())["models"]] == ["a", "b"]


@pytest.mark.parametrize("state", ["loaded", "asleep", "busy", "unloaded"])
def test_what_is_wrong_in_models_json_is_the_requests_fault_at_once(server: Server, state: str) -> None:
    """Whatever the model does meanwhile, and before anything is loaded for it."""
    if state == "unloaded":
        server.control.unload("b")
    elif state == "asleep":
        server.control._away(server.control._served["b"], "asleep")
    server.triton.calls.clear()

    def wrong(each: EngineSet, beside: bool) -> tuple[Entry, Share]:
        assert beside == (state != "unloaded")
        raise UserError("model b: model.nonsense is no known key")

    server.again = wrong
    lock = server.control._served["b"].lock
    with lock if state == "busy" else contextlib.nullcontext():
        for operation in ("replace", *(("load",) if state == "unloaded" else ())):
            told = answer(server.control, b'{"operation": "%s", "model": "b"}' % operation.encode())
            assert told.is_request and told.error == "model b: model.nonsense is no known key"
    assert server.triton.calls == []


def test_settings_that_the_engine_refuses_are_the_requests_fault(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "load failed for model 'b': version 1 is at UNAVAILABLE state: Internal: ConfigError: model.device is cuda:0"
    bodies = {"load": {"error": f"{told}, and there is no GPU\n\nAt:\n  /x/model.py(7): initialize\n"}}

    def request(url: str, method: str, path: str, *rest: object) -> tuple[int, str]:
        action = path.rpartition("/")[2]
        return (400, msgspec.json.encode(bodies[action]).decode()) if action in bodies else (200, "")

    monkeypatch.setattr(triton_control.probe, "request", request)
    triton = triton_control.TritonControl("http://x", "key")
    with pytest.raises(UserError) as caught:
        triton.load("b", 1.0)
    assert str(caught.value) == "load of b: model.device is cuda:0, and there is no GPU"
    bodies["load"]["error"] = "load failed for model 'b': no memory"
    with pytest.raises(ControlFailed, match="no memory"):
        triton.load("b", 1.0)


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'{"operation": "erase"}', b'{"operation": "load", "x": 1}', b"[" * 4096, b'{"operation": 7}'],
)
def test_a_line_that_is_no_operation_is_an_answer(line: bytes, server: Server) -> None:
    told = answer(server.control, line)
    assert told.error.startswith("the line is no operation: ") and told.is_request and server.triton.calls == []


def test_a_failed_operation_is_an_answer(server: Server) -> None:
    server.triton.fails = {"b.engine-3"}
    told = answer(server.control, b'{"operation": "replace", "model": "b"}')
    assert told.error == "load of b.engine-3: no" and not told.is_request
    assert answer(server.control, b'{"operation": "load", "model": "c"}').is_request


def test_a_failure_that_nobody_has_foreseen_is_in_the_log_and_leaves_no_directory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, config: EngineConfig) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "write_config", full)
    told = answer(server.control, b'{"operation": "replace", "model": "a"}')
    assert told.error == "replace failed: OSError; see the server's log" and not told.is_request
    assert "replace of model a failed: OSError: [Errno 28] No space left on device" in server.told
    assert server.state("a") == "loaded" and not (server.place / "e3").exists()
