"""The socket for operations on models: what is answered, to whom, and whose fault it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineConfig
from deploy import control_socket, rundir, triton_control
from deploy.control_socket import ControlSocket, answer
from deploy.engine_sets import EngineSet
from deploy.errors import UserError
from deploy.models_file import Entry
from deploy.shares import Share
from deploy.triton_control import ControlFailed
from tests.deploy.scripted_models import Server


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


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

    def request(url: str, method: str, path: str, *rest: object, **more: object) -> tuple[int, str]:
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
