"""Doctor's rows as data."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from backend.api.config.schema import EngineConfig
from deploy import default_model, doctor, invocation, libpython, memory, model_source, running
from deploy.doctor import Finding, show
from deploy.errors import UserError

# Listens on a port, prints it, and ends with its standard input.
LISTEN = [
    sys.executable,
    "-c",
    "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()",
]


def test_every_row_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpython, "find", lambda version=None: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "DISK_WANTED", 1 << 62)
    monkeypatch.setattr(doctor, "MEMORY_WANTED", 1 << 62)
    monkeypatch.setattr(doctor, "SHM_WANTED", 1 << 62)
    monkeypatch.setattr(doctor, "GLIBC_WANTED", (99, 0))
    bad = [
        doctor.stub_library(),
        doctor.compiler(),
        doctor.disk(),
        doctor.memory(),
        doctor.shared_memory(),
        doctor.libc(),
    ]
    assert all(finding.state != "ok" and finding.remedy for finding in bad), bad


def test_choices_of_the_cpu_kernels_are_shown_and_a_wrong_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.cpu_kernels()
    assert finding.state == "ok" and "rows by vectors; pieces of" in finding.seen
    monkeypatch.setenv("EVERBATCH_CHOICES", "speed=1")
    finding = doctor.cpu_kernels()
    assert finding.state == "fail" and "EVERBATCH_CHOICES has 'speed'" in finding.seen and finding.remedy


@pytest.mark.parametrize(
    ("free", "available", "limit", "used", "state", "seen"),
    [
        (1, 8, None, 0, "ok", "8.0 GiB available of 16.0 GiB"),  # what the page cache has can be had
        (8, 1, None, 0, "warn", "1.0 GiB available of 16.0 GiB"),
        (8, 8, 4, 1, "ok", "3.0 GiB available of 4.0 GiB"),  # a container's limit, where it is the lower one
        (8, 8, 4, 3, "warn", "1.0 GiB available of 4.0 GiB"),
        (1, 1, 4, 1, "warn", "1.0 GiB available of 4.0 GiB"),
    ],
)
def test_memory_is_what_can_be_had_of_the_machine_and_of_the_container(
    *,
    free: int,
    available: int,
    limit: int | None,
    used: int,
    state: str,
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"MemTotal": 16 << 30, "MemFree": free << 30, "MemAvailable": available << 30}
    monkeypatch.setattr(memory, "_meminfo", lambda: told)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n" if limit is None else f"{limit << 30}\n")
    (tmp_path / "memory.current").write_text(f"{used << 30}\n")
    finding = doctor.memory()
    assert finding.state == state and finding.seen.startswith(seen)


def test_a_missing_libpython_fails_and_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpython, "find", lambda version=None: None)
    finding = doctor.stub_library()
    assert finding.state == "fail" and "apt-get install -y libpython3" in finding.remedy


def test_a_missing_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise UserError("no tritonserver anywhere")

    monkeypatch.setattr(invocation, "find_installation", none)
    assert doctor.server() == Finding("tritonserver", "fail", "not found", "no tritonserver anywhere")


def test_a_taken_port_fails_and_names_the_option() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        number = other.getsockname()[1]
        finding = doctor.port("127.0.0.1", number, "--grpc-port")
    assert finding.state == "fail" and "--grpc-port PORT" in finding.remedy
    assert doctor.port("127.0.0.1", number, "--grpc-port").state == "ok"


def test_a_port_of_this_checkouts_own_server_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor finds the process that listens on the port, and sees whether a server of this checkout has started it."""
    monkeypatch.setattr(running, "default_run_directory", lambda name: tmp_path / name)
    (tmp_path / "serve-1").mkdir()
    with socket.socket() as ours, subprocess.Popen(LISTEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        ours.bind(("127.0.0.1", 0))
        ours.listen(1)
        assert child.stdout is not None
        numbers = [ours.getsockname()[1], int(child.stdout.readline())]  # this process's, and that of a child
        assert [doctor.port("127.0.0.1", number, "--grpc-port").state for number in numbers] == ["fail", "fail"]
        running.write(tmp_path / "serve-1", "serving", "http://127.0.0.1:1", "127.0.0.1:2", EngineConfig())
        for number in numbers:
            finding = doctor.port("127.0.0.1", number, "--grpc-port")
            assert finding.state == "warn" and "the small model at http://127.0.0.1:1" in finding.seen
        child.communicate(b"\n")


def test_lines_in_a_pipe_are_whole() -> None:
    console = Console(file=io.StringIO(), width=20)
    path = "/a/long/path/" + "x" * 100
    assert show([Finding("name", "warn", path, "a remedy"), Finding("b", "ok", "fine")], console) == 0
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == [f"warn  name  {path}", "            a remedy", "ok    b     fine", "", "ready to serve"]


def test_a_machine_without_a_gpu_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.gpu().state == "ok"


def test_a_missing_default_model_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_model.VARIABLE, str(tmp_path))
    assert doctor.model().state == "warn" and "--model PATH_OR_HUB_ID" in doctor.model().remedy


def test_the_default_model_is_the_fetched_one_else_the_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(default_model.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(model_source.DEFAULT_MODEL) in doctor.model().seen and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(default_model, "cached", lambda published: tmp_path / published.file)
    assert default_model.SMOLLM2.title in doctor.model().seen


@pytest.mark.parametrize(("states", "status"), [(["ok", "warn"], 0), (["ok", "fail"], 1)])
def test_only_failures_make_the_exit_status_one(states: list[doctor.State], status: int) -> None:
    output = io.StringIO()
    findings = [Finding(f"row {state}", state, "seen [1/2]", "do this") for state in states]
    assert doctor.show(findings, Console(file=output, width=80)) == status
    assert "seen [1/2]" in output.getvalue() and "do this" in output.getvalue()
