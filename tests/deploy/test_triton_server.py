"""The life of a server around a stand-in for tritonserver: a script that writes its flags into the log and waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api.config.schema import EngineConfig
from deploy import invocation, memory, rundir, secret_flags, signs, stubs
from deploy.errors import ServerFailed
from deploy.health import Report
from deploy.invocation import Installation
from deploy.processes import Process
from deploy.stubs import Stubs
from deploy.triton_server import TritonServer

SCRIPT = f"""#!{sys.executable}
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("\\n".join(sys.argv[1:]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    script = tmp_path / "tritonserver"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr(invocation, "find_installation", lambda: Installation(script))
    return Installation(script)


@pytest.fixture
def server(installation: Installation, tmp_path: Path) -> Iterator[TritonServer]:
    server = TritonServer(EngineConfig(), run_dir=tmp_path / "run")
    yield server
    server.kill()


def wait_for(text: str, path: Path) -> str:
    deadline = time.monotonic() + 60
    while text not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()


def test_the_server_gets_the_admin_key_and_its_command_line_does_not_show_it(server: TritonServer) -> None:
    server.start()
    said = wait_for("--grpc-restricted-protocol", server.log_path)
    assert said.count(f"{invocation.ADMIN_HEADER}={server.admin_key}") == 2
    for pid in server.processes():
        assert server.admin_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_where_the_flags_cannot_be_hidden_the_server_runs_all_the_same_and_the_log_says_so(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(secret_flags, "reveal", refuse)
    server.start()
    said = wait_for("--grpc-restricted-protocol", server.log_path)
    assert said.count(f"{invocation.ADMIN_HEADER}={server.admin_key}") == 2
    assert "every user of this machine sees the admin key" in said


def test_a_start_keeps_the_log_of_the_one_before(server: TritonServer) -> None:
    for _ in range(2):
        server.start()
        wait_for("--grpc-restricted-protocol", server.log_path)
        server.kill()
    logs = [server.log_path, server.log_path.with_name("server.log.1")]
    assert all("--grpc-restricted-protocol" in log.read_text() for log in logs)


def test_a_start_makes_the_pipe_for_signs_of_life_anew_and_a_kill_removes_it(server: TritonServer) -> None:
    if rundir.plain_directory(server.run_dir)[1]:
        pytest.skip("the temporary directory of this machine is too long for a socket")
    server.run_dir.mkdir()
    pipe = server.run_dir / signs.PIPE
    pipe.write_text('{"model": "a", "state": "given_up", "pid": 1, "live": 0}\n')  # left by another version, say
    server.start()
    assert pipe.is_fifo() and server._signs is not None and server._signs.look() == []
    server.kill()
    assert not pipe.exists()


def test_no_temporary_socket_directory_is_left_even_without_a_janitor(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "sockets"
    monkeypatch.setattr("deploy.rundir.tempfile.mkdtemp", lambda **_: made.mkdir() or str(made))
    server = TritonServer(EngineConfig(), run_dir=tmp_path / ("long" * 30))

    def fail() -> None:
        assert made.is_dir()
        raise OSError("no process can be started")

    monkeypatch.setattr(server, "_start_janitor", fail)
    with pytest.raises(OSError, match="no process"):
        server.start()
    server.kill()
    assert not made.exists()


def test_a_server_that_has_grown_too_large_has_failed(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    assert server.failure() is None
    watch = memory.MemoryWatch(server.pid)
    watch._limit = memory.resident_bytes(server.pid) // 2
    monkeypatch.setattr(server, "_memory", watch)
    failure = server.failure()
    assert failure is not None and "GB" in failure.text and not failure.final


def test_a_server_that_has_ended_has_failed_with_its_status(server: TritonServer) -> None:
    server.start()
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    failure = server.failure()
    assert failure is not None and failure.text.startswith("tritonserver was ended by signal 9 (SIGKILL); the log is ")
    assert f"{server.log_path}, and server.log.1 beside it once" in failure.text


@pytest.mark.parametrize("last_words, by_chance", [("boost::interprocess::lock_exception", True), ("segfault", False)])
def test_a_start_that_died_of_a_lock_may_be_tried_again(
    installation: Installation, server: TritonServer, last_words: str, by_chance: bool
) -> None:
    installation.binary.write_text(f"#!{sys.executable}\nraise SystemExit({last_words!r})\n")
    server.start()
    with pytest.raises(ServerFailed) as failed:
        server.wait_ready(60)
    assert failed.value.by_chance == by_chance


def test_a_stub_that_came_when_a_model_was_loaded_anew_is_missed_when_it_dies_and_the_old_one_is_not(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    assert server._signs is not None
    old, new = Process(2**22 + 1, 1), Process(2**22 + 2, 1)  # there are no such processes: both have ended
    server._stubs = Stubs(server.pid, lambda model: True)
    monkeypatch.setattr(stubs, "stubs_of", lambda pid: [old])
    server._stubs.take_in()
    assert server.dead_stubs() == [old]
    monkeypatch.setattr(stubs, "stubs_of", lambda pid: [new])
    seen = {1: Report("a", "unloaded", old.pid), 2: Report("a", "ready", new.pid)}
    monkeypatch.setattr(server._signs, "_take", lambda: {report.pid: report for report in seen.values()})
    server._signs.look()
    assert server.dead_stubs() == [new]
    server._monitor = object()  # from then on an end is certain when its last words would have been read
    assert server.dead_stubs() == []
    for _ in range(3):
        server._signs.look()
    assert server.dead_stubs() == [new]
    server._monitor = None
