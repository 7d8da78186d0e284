"""The pipe by which stubs tell the launcher how they are, and how a slow process is told from a dead one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from backend.api.processes import liveness
from backend.api.processes.liveness import CpuDemand
from backend.serving.lifecycle.environment import RunDirectory
from deploy import health, processes, signs
from deploy.health import Report
from deploy.signs import Signs


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Signs]:
    made = Signs(tmp_path / signs.PIPE)
    yield made
    made.close()


def give(directory: Path, model: str = "a", state: str = "ready", pid: int = 1, live: int = 0) -> None:
    line = json.dumps({"model": model, "state": state, "pid": pid, "live": live}).encode()
    write(directory, line + b"\n")


def write(directory: Path, data: bytes) -> None:
    with open(os.open(directory / signs.PIPE, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as file:
        file.write(data)


def test_what_a_stub_writes_is_what_the_launcher_reads(pipe: Signs, tmp_path: Path) -> None:
    RunDirectory(tmp_path).report_health("ensemble", "unavailable", 3, "the engine is not running")
    (report,) = pipe.look()
    assert report == Report("ensemble", "unavailable", os.getpid(), 3, 0.0, why="the engine is not running")
    assert health.judge([report]).unready == "model ensemble is unavailable: the engine is not running"


def test_a_sign_of_life_needs_neither_a_reader_nor_room_in_the_pipe(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.report_health("a", "ready", 0)  # a plain tritonserver: there is no pipe
    os.mkfifo(tmp_path / signs.PIPE)
    directory.report_health("a", "ready", 0)  # a launcher that has gone
    (tmp_path / signs.PIPE).unlink()
    pipe = Signs(tmp_path / signs.PIPE)
    for _ in range(2000):  # a launcher that has been stopped for minutes
        directory.report_health("a" * 60, "ready", 0)
    assert pipe.look()[0].model == "a" * 60
    pipe.close()
    assert not (tmp_path / signs.PIPE).exists()


def test_only_this_user_may_give_signs(pipe: Signs, tmp_path: Path) -> None:
    assert (tmp_path / signs.PIPE).stat().st_mode & 0o777 == 0o600


def test_lines_that_are_no_signs_are_left_out_and_one_that_comes_in_two_pieces_is_not(
    pipe: Signs, tmp_path: Path
) -> None:
    write(tmp_path, b'[]\n{"model": "a"}\nnonsense\n\xff\n{"model": "a", "state": "ready", ')
    assert pipe.look() == []
    write(tmp_path, b'"pid": 7, "live": 0}\n')
    assert pipe.look() == [Report("a", "ready", 7)]


def test_an_old_stub_that_is_unloaded_says_nothing_of_the_new_one_of_the_same_model(
    pipe: Signs, tmp_path: Path
) -> None:
    give(tmp_path, "ensemble", "ready", pid=1)
    give(tmp_path, "ensemble", "ready", pid=2)
    give(tmp_path, "ensemble", "unloaded", pid=1)
    assert {(report.pid, report.state) for report in pipe.look()} == {(1, "unloaded"), (2, "ready")}
    assert pipe.unloaded() == {1}
    for _ in range(20):
        give(tmp_path, "ensemble", "ready", pid=2)
        assert health.judge(pipe.look()) == health.Verdict()


def test_what_an_ended_stub_has_said_is_known_some_looks_behind_its_end(pipe: Signs, tmp_path: Path) -> None:
    give(tmp_path, "a", pid=1)
    pipe.look()
    give(tmp_path, "a", "unloaded", pid=1)
    assert not pipe.has_said_all(1) and pipe.unloaded() == set(), "its last words wait in the pipe"
    for _ in range(2):
        pipe.look()
        assert not pipe.has_said_all(1) and pipe.unloaded() == {1}
    pipe.look()
    assert pipe.has_said_all(1) and pipe.model_of(1) == "a" and pipe.model_of(2) == ""


def test_silence_is_counted_in_looks_and_ends_with_a_sign(
    pipe: Signs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "cpu_demand", lambda pid: CpuDemand())
    give(tmp_path)
    assert [pipe.look()[0].silent_s for _ in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    give(tmp_path)
    give(tmp_path, "b", pid=2)
    assert [report.silent_s for report in pipe.look()] == [0.0, 0.0]
    assert [pipe.look()[0].silent_s for _ in range(2)] == [0.25, 0.5]


QUARTER_NS = 250_000_000


@pytest.mark.parametrize(
    "share, waiting, busy", [(0.0, False, False), (0.4, False, False), (0.6, False, True), (0.0, True, True)]
)
def test_a_process_that_wants_half_of_a_processor_or_waits_for_one_is_busy(
    pipe: Signs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, waiting: bool, busy: bool
) -> None:
    clock = count()
    now = {"looks": 0}

    def demand(pid: int) -> CpuDemand:
        now["looks"] = next(clock)
        return CpuDemand(int(7e9 + now["looks"] * QUARTER_NS * share), waiting)

    monkeypatch.setattr(liveness, "cpu_demand", demand)
    monkeypatch.setattr(liveness.time, "monotonic_ns", lambda: (now["looks"] + 1) * QUARTER_NS)
    give(tmp_path)
    reports = [pipe.look()[0] for _ in range(8)]
    assert reports[-1].busy == busy and reports[-1].is_silent != busy


def test_once_a_silent_process_was_found_idle_a_moments_work_does_not_make_it_look_well(
    pipe: Signs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = iter([False] * 4 + [True] * 3)
    monkeypatch.setattr(liveness, "cpu_demand", lambda pid: CpuDemand(0, next(waiting)))
    give(tmp_path)
    silent = [pipe.look()[0].is_silent for _ in range(9)]
    assert silent == [False] * 5 + [True] * 4
    give(tmp_path)
    assert not pipe.look()[0].is_silent


BUSY = "print(flush=True)\nwhile True: pass"
IDLE = "import time\nprint(flush=True)\ntime.sleep(600)"


@pytest.fixture
def started() -> Iterator[Callable[[str], int]]:
    children: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> int:
        children.append(subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE))
        assert children[-1].stdout is not None and children[-1].stdout.readline()
        return children[-1].pid

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_process_that_works_wants_a_processor_and_one_that_is_stopped_or_gone_does_not(
    started: Callable[[str], int],
) -> None:
    pid = started(BUSY)
    first = liveness.cpu_demand(pid)
    while liveness.cpu_demand(pid).wanted_ns <= first.wanted_ns:  # It is told when the kernel switches tasks.
        pass
    assert first.waiting
    os.kill(pid, signal.SIGSTOP)
    while (stat := processes.read_stat(pid)) is not None and stat.state != "T":
        pass
    stopped = liveness.cpu_demand(pid)
    assert not stopped.waiting and liveness.cpu_demand(pid) == stopped
    gone = started(IDLE)
    os.kill(gone, signal.SIGKILL)
    os.waitid(os.P_PID, gone, os.WEXITED | os.WNOWAIT)
    assert not liveness.cpu_demand(gone).waiting
    assert liveness.cpu_demand(2**22 + 1) == CpuDemand()


def open_files(directory: Path) -> list[str]:
    """What this process has open of a directory: threads that other tests left may open and close files meanwhile."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(str(directory))]


def test_no_sign_and_no_pipe_leaves_a_file_open(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for _ in range(3):
        pipe = Signs(tmp_path / signs.PIPE)
        assert open_files(tmp_path)
        for _ in range(3):
            directory.report_health("a", "ready", 0)
        pipe.close()
    assert not open_files(tmp_path)


def test_what_a_stub_meets_that_is_no_lack_of_a_reader_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / signs.PIPE).mkdir()
    with pytest.raises(IsADirectoryError):
        RunDirectory(tmp_path).report_health("a", "ready", 0)
