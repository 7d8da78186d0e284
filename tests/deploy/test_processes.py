"""Ours is what carries the run id, and nothing else is ever touched."""

from __future__ import annotations

import io
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import ROOT, janitor, processes

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start a command and wait for the first line it prints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables})
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = start(SLEEP, EVERBATCH_RUN_ID="somebody-else")
    yield process
    process.kill()
    process.wait()


def test_kill_run_ends_its_own_processes_and_spares_others(bystander: subprocess.Popen[bytes]) -> None:
    run_id = secrets.token_hex(8)
    ours = [start(SLEEP, EVERBATCH_RUN_ID=run_id) for _ in range(2)]
    assert {process.pid for process in processes.processes_of_run(run_id)} == {process.pid for process in ours}
    assert processes.kill_run(run_id) == []
    assert [process.wait() for process in ours] == [-signal.SIGKILL] * 2
    assert bystander.poll() is None


def test_a_process_that_is_known_is_waited_for_although_its_environment_is_gone(
    bystander: subprocess.Popen[bytes],
) -> None:
    """A process that is ending is such a case: the bystander's environment does not say that it is ours."""
    stat = processes.read_stat(bystander.pid)
    assert stat is not None
    assert processes.kill_run(secrets.token_hex(8), known=[processes.Process(bystander.pid, stat.start)]) == []
    assert bystander.poll() == -signal.SIGKILL


def test_a_run_id_that_is_a_prefix_of_another_does_not_match(bystander: subprocess.Popen[bytes]) -> None:
    assert processes.processes_of_run("somebody") == []


def test_a_zombie_does_not_count_as_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    stat = processes.read_stat(child.pid)
    assert stat is not None
    seen = processes.Process(child.pid, stat.start)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert not seen.alive()
    child.wait()
    assert processes.read_stat(child.pid) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-9, "was ended by signal 9 (SIGKILL)"),
        (-11, "was ended by signal 11 (SIGSEGV)"),
        (-40, "was ended by signal 40"),
    ],
)
def test_an_exit_status_is_put_into_words(status: int, words: str) -> None:
    assert processes.describe_end(status) == words


def test_a_reused_pid_is_not_taken_for_the_former_process() -> None:
    """The bystander answers after the signal has been sent: one that SIGKILL has reached says nothing any more."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bystander:
        assert bystander.stdin is not None and bystander.stdout is not None
        former = processes.Process(bystander.pid, start=1)
        assert not former.alive()
        processes.send_signal(former, signal.SIGKILL)
        bystander.stdin.write(b"still here\n")
        bystander.stdin.flush()
        assert bystander.stdout.readline() == b"still here\n"


def test_a_stub_is_known_by_its_program_and_its_parent(tmp_path: Path) -> None:
    stub = tmp_path / processes.STUB_NAME
    stub.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(stub), "600"], executable=str(stub))
    other = subprocess.Popen(["/bin/sleep", "600"])
    try:
        while not Path(f"/proc/{child.pid}/cmdline").read_bytes():  # Popen returns a moment before exec has set it
            pass
        assert [process.pid for process in processes.stubs_of(os.getpid())] == [child.pid]
        assert processes.stubs_of(child.pid) == []
    finally:
        for process in (child, other):
            process.kill()
            process.wait()


def test_a_signal_handler_is_seen_from_outside() -> None:
    code = (
        "import signal,time; signal.signal(signal.SIGUSR1, lambda *a: None); print('up', flush=True); time.sleep(600)"
    )
    handles, plain = start([sys.executable, "-c", code]), start(SLEEP)
    try:
        assert processes.catches(handles.pid, signal.SIGUSR1)
        assert not processes.catches(plain.pid, signal.SIGUSR1)
    finally:
        for process in (handles, plain):
            process.kill()
            process.wait()


def test_shared_memory_is_removed_by_prefix_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SHM_DIRECTORY", tmp_path)
    for name in ("region_ours_1", "region_ours_2", "region_theirs_1"):
        (tmp_path / name).write_text("")
    assert processes.remove_shared_memory("region_ours_") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["region_theirs_1"]


def test_the_janitor_ends_and_removes_what_a_dead_launcher_has_left_and_nothing_else(tmp_path: Path) -> None:
    run_id = secrets.token_hex(8)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    regions = [processes.SHM_DIRECTORY / f"everbatch_test_{run_id}_{name}" for name in ("ours_1", "ours_2", "theirs")]
    for region in regions:
        region.touch()
    orphan = start(SLEEP, EVERBATCH_RUN_ID=run_id)
    prefix = f"everbatch_test_{run_id}_ours"
    command = [sys.executable, "-P", "-m", "deploy.janitor", run_id, prefix, str(sockets)]
    janitor = subprocess.Popen(command, stdin=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
    try:
        assert janitor.stdin is not None
        deadline = time.monotonic() + 60
        while not ignores(janitor.pid, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}):
            assert time.monotonic() < deadline, "it ends with its launcher"
        assert orphan.poll() is None and sockets.exists() and all(region.exists() for region in regions)
        janitor.stdin.close()  # the kernel does this when the launcher is killed
        assert janitor.wait(timeout=20) == 0
        assert orphan.wait(timeout=20) == -signal.SIGKILL
        assert not sockets.exists() and [region.exists() for region in regions] == [False, False, True]
    finally:
        for region in regions:
            region.unlink(missing_ok=True)


def test_the_janitor_waits_for_the_end_of_its_launcher_whatever_that_writes_and_says_what_it_could_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with all that it does noted."""
    done: list[object] = []
    monkeypatch.setattr(janitor.signal, "signal", lambda number, action: done.append((number, action)))
    monkeypatch.setattr(janitor.sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some bytes")))
    monkeypatch.setattr(janitor, "kill_run", lambda run_id: done.append(("kill", run_id)) or [77])
    monkeypatch.setattr(janitor, "remove_shared_memory", lambda prefix: done.append(("remove", prefix)))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert janitor.main(["run", "prefix", str(first), str(second)]) == 1
    ignored = [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert done == [*ignored, ("kill", "run"), ("remove", "prefix")]
    assert list(tmp_path.iterdir()) == []


def ignores(pid: int, numbers: set[signal.Signals]) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return all(int(line.split()[1], 16) >> (number - 1) & 1 for number in numbers)


def test_a_spawned_command_dies_with_its_parent_and_keeps_its_pid() -> None:
    """A middleman spawns the command, says its pid and waits; then the middleman is killed."""
    code = (
        "import os,subprocess,sys\n"
        "c=subprocess.Popen([sys.executable,'-P','-m','deploy.spawn',str(os.getpid()),str(16<<20),"
        "sys.executable,'-c','import os,time; print(os.getpid(), flush=True); time.sleep(600)'])\n"
        "print(c.pid, flush=True); c.wait()"
    )
    middleman = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert middleman.stdout is not None
    pids = {int(middleman.stdout.readline()) for _ in range(2)}
    assert len(pids) == 1  # what subprocess knows as the server is the server
    stat = processes.read_stat(pids.pop())
    assert stat is not None and stat.parent == middleman.pid
    middleman.kill()
    assert middleman.stdout.read() == ""  # end of file: the last holder of the pipe, the command, is gone
    middleman.wait()


def test_a_command_is_not_started_for_a_parent_that_is_gone() -> None:
    command = [sys.executable, "-P", "-m", "deploy.spawn", "1", "0", "/bin/echo", "started"]
    result = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert result.returncode != 0
    assert "started" not in result.stdout
