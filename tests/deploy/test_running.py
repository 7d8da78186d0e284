"""Which servers of this checkout run: what the launcher tells, and whom `generate` and `chat` ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from client import cli as client_cli
from client.located import introduced
from deploy import cli, running
from deploy.ports import Ports
from deploy.processes import read_stat
from deploy.triton_server import TritonServer


def told(parent: Path, name: str, state: running.State, port: int, age_s: float = 0.0) -> None:
    directory = parent / name
    directory.mkdir()
    running.write(directory, state, f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}", EngineConfig())
    moment = directory.stat().st_mtime - age_s
    os.utime(directory / running.FILE, (moment, moment))


def test_the_latest_server_that_serves_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "default_run_directory", lambda name: tmp_path / name)
    assert running.locate() is None
    told(tmp_path, "serve-1", "serving", 1, age_s=20)
    told(tmp_path, "serve-2", "serving", 2, age_s=10)
    told(tmp_path, "serve-3", "stopping", 3)
    told(tmp_path, "server-4", "serving", 4)  # of a test
    found = running.locate()
    assert found is not None and found.grpc_url == "127.0.0.1:3" and found.http_url == "http://127.0.0.1:2"
    assert found.model == "the small model" and [each.grpc_url for each in found.others] == [
        "127.0.0.1:2",
        "127.0.0.1:4",
    ]
    name = "the small model"
    assert introduced(found, None, "ensemble") == (
        f"{name} answers, at 127.0.0.1:3; --url for {name} at 127.0.0.1:2 or {name} at 127.0.0.1:4"
    )
    assert introduced(found, "http", "ensemble").endswith(
        f"{name} at http://127.0.0.1:1 or {name} at http://127.0.0.1:3"
    )
    assert [each.http_url[-1] for each in running.running()] == ["3", "2", "1"]


def test_what_a_killed_launcher_or_another_version_has_left_is_not_believed(tmp_path: Path) -> None:
    told(tmp_path, "serve-1", "serving", 1)
    (one,) = running.running(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stat = read_stat(other.pid)
        assert stat is not None
        of_other = replace(one, pid=other.pid, start=stat.start)
        file = tmp_path / "serve-1" / running.FILE
        file.write_bytes(running.msgspec_json.encode(of_other))
        assert running.running(tmp_path) == [of_other]
        file.write_bytes(running.msgspec_json.encode(replace(of_other, start=stat.start + 1)))
        assert running.running(tmp_path) == [], "the process id belongs to another process by now"
        file.write_bytes(running.msgspec_json.encode(of_other))
        other.communicate()
    assert running.running(tmp_path) == []
    for text in (b"", b"{}", b"\xff", b"[" * 100_000):
        file.write_bytes(text)
        assert running.running(tmp_path) == []


def test_the_launcher_tells_of_its_server_and_forgets_it(tmp_path: Path) -> None:
    server = TritonServer(load_config(overrides=["model.path=/models/my-model"]), Ports(5, 6, 7), tmp_path / "serve-5")
    server.run_dir.mkdir()
    server._tell("starting")
    (found,) = running.running(tmp_path)
    assert (found.state, found.grpc_url, found.http_url) == ("starting", "127.0.0.1:6", "http://127.0.0.1:5")
    assert found.model == "my-model" and (server.run_dir / running.FILE).stat().st_mode & 0o77 == 0
    running.forget(server.run_dir)
    assert running.running(tmp_path) == []


def test_a_full_disk_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    TritonServer(EngineConfig(), Ports(5, 6, 7), tmp_path / "no such directory")._tell("starting")


def test_the_command_line_asks_the_servers_of_this_checkout() -> None:
    assert cli.app is not None and client_cli.locate is running.locate
