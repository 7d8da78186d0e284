"""ModelControl over a scripted Triton: what is loaded, unloaded and written, in which order, and what failures leave."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from backend.api import load_config
from backend.api.config.multi_model import Notice
from deploy import model_control
from deploy.errors import UserError
from deploy.health import Report
from deploy.model_control import GIVEN_UP, REPLACED, UNLOADED
from deploy.models_file import Entry
from deploy.shares import Share
from deploy.triton_control import ControlFailed
from tests.deploy.scripted_models import SHARE, Server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(model_control, "SETTLE_S", 0.02)  # the scripted stubs need no time
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


def keep_the_former(server: Server) -> int:
    """The stub of b.everbatch, which still has a request when its clients have moved."""
    triton, load = server.triton, server.triton.load
    (former,) = triton._pids("b.everbatch")

    def keeps(model: str, timeout_s: float) -> None:
        load(model, timeout_s)
        if model == "b.everbatch":
            triton.stubs[former], triton.live[former] = Report(model, "ready", former), 1

    triton.load = keeps  # type: ignore[method-assign]
    return int(former)


def test_the_former_engine_ends_after_its_last_request(server: Server) -> None:
    triton, former = server.triton, keep_the_former(server)
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
    triton = server.triton
    keep_the_former(server)
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


@pytest.mark.parametrize("how", ["load of one unloaded", "load of one asleep", "replace", "Triton's own model control"])
def test_a_model_that_is_there_again_is_idle_from_then_on(how: str, server: Server) -> None:
    """Its last request may have been long ago."""
    if how == "load of one unloaded":
        server.control.unload("a")
    elif how == "Triton's own model control":
        server.triton.unload("a.engine")
        server.settle()
    server.now = 100.0
    if how == "load of one asleep":
        server.settle()
        assert server.state("a") == "asleep"
        server.now = 200.0
    came = server.now
    if how == "replace":
        server.control.replace("a")
    elif how == "Triton's own model control":
        server.triton.load("a.engine", 1)
        server.settle()
    else:
        server.control.load("a")
    server.now = came + 29.0
    server.settle()
    assert server.state("a") == "loaded"
    server.now = came + 30.0
    server.settle()
    assert server.state("a") == "asleep"


def test_a_replacement_lives_by_what_the_file_says_then(server: Server) -> None:
    server.again = lambda each, beside: (Entry("y", idle_unload_s=5.0, load_timeout_s=7.0), SHARE)
    server.control.replace("b")
    server.now = 5.0
    server.settle()
    assert server.state("b") == "asleep" and server.notice(3) == Notice("asleep", "", 7.0)


def test_a_second_replacement_ends_the_engine_of_the_first(server: Server) -> None:
    shares = [Share(load_config(overrides=[f"kv_cache.max_tokens={tokens}"]), tokens) for tokens in (64, 128)]
    ended: set[int] = set()
    for number, share in enumerate(shares, 3):
        ended |= {pid for name in ("b.vllm_model", "b.everbatch") for pid in server.triton._pids(name)}
        server.again = lambda each, beside, share=share: (each.entry, share)  # type: ignore[misc]
        server.triton.calls.clear()
        server.control.replace("b")
        former = "b.engine" if number == 3 else f"b.engine-{number - 1}"
        assert server.triton.calls[0] == f"load b.engine-{number}" and server.triton.calls[-1] == f"unload {former}"
        assert not (server.place / "models" / former).exists() and not (server.place / f"e{number - 1}").exists()
        (_, described) = server.control.described()
        assert (described.engine, described.owner, described.memory_bytes) == (
            *(number, f"b.engine-{number}", share.num_bytes),
        )
    assert len(ended) == 4 and ended <= server.control.retired
    assert {server.triton.engine_of[name] for name in ("b.engine-4", "b.vllm_model", "b.everbatch")} == {"e4"}
    server.control.replace("a")
    assert server.triton.calls[-1] == "unload a.engine", "numbers are of the server, so no two engines share one"
    assert server.triton.engine_of["everbatch"] == "e5" and server.triton.is_ready("b.engine-4")


def test_a_model_that_is_asleep_is_loaded_before_it_is_replaced(server: Server) -> None:
    """Requests may be held for its former engine, which has to answer them."""
    server.now = 100.0
    server.settle()
    assert server.state("a") == "asleep"
    server.triton.calls.clear()
    server.control.replace("a")
    assert server.triton.calls[:2] == ["load a.engine", "load a.engine-3"]
    assert server.triton.calls[-1] == "unload a.engine" and server.state("a") == "loaded"


@pytest.mark.parametrize("operation", ["unload", "replace"])
def test_an_operation_is_over_when_the_process_of_the_engine_has_ended(
    operation: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its memory is taken and its directory, with its socket, is in use."""
    looks: list[bool] = []

    def is_alive(pid: int) -> bool:
        looks.append((server.place / "e2").exists())
        return len(looks) < 4

    monkeypatch.setattr(server.control, "_is_alive", is_alive)
    getattr(server.control, operation)("b")
    assert looks == [True] * 4
    assert (server.place / "e2").exists() == (operation == "unload")


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


@pytest.mark.parametrize("state", ["asleep", "unloaded"])
def test_signs_that_are_older_than_an_operation_undo_nothing(
    state: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signs are read four times a second, so an engine that has ended may still seem to be ready."""
    signs = server.triton.reports()
    monkeypatch.setattr(server.control, "_reports", lambda: signs)
    if state == "unloaded":
        server.control.unload("a")
    server.now = 100.0
    for _ in range(3):
        server.settle()
        assert server.state("a") == state
    monkeypatch.setattr(server.control, "_reports", server.triton.reports)
    for _ in range(2):
        server.settle()
    notice = server.notice(1)
    assert server.state("a") == state and notice is not None and notice.state == state
    server.triton.load("a.engine", 1)
    server.settle()
    assert server.state("a") == "loaded", "by Triton's own model control, with another stub"


def test_an_engine_that_is_given_up_is_this_models_failure_only(server: Server) -> None:
    (pid,) = server.triton._pids("b.engine")
    server.triton.stubs[pid] = Report("b.engine", "given_up", pid)
    server.settle()
    assert server.state("b") == "failed" and server.state("a") == "loaded"
    assert server.triton.calls == ["unload b.engine"] and server.notice(2) == Notice("failed", GIVEN_UP)


def test_an_unknown_model_is_one_sentence_with_those_that_there_are(server: Server) -> None:
    with pytest.raises(UserError, match="there is no model 'c'; there are a, b"):
        server.control.load("c")
