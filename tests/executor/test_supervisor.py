"""Starting an engine process again: the supervisor over programs that live as the test says."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.api import ConfigError, EngineConfig, EngineUnavailable
from backend.api.config.schema import KvCacheConfig, WorkersConfig
from backend.api.processes import back_off
from backend.api.processes.back_off import BackOff
from backend.executor import engine_supervisor as supervisor
from backend.executor.engine_supervisor import MAX_RESTARTS, EngineProcess
from backend.executor.kept_files import KeptFiles
from backend.wire.client import wait_until

READY = """echo '{"ready": true}'"""
STAY = "read nothing"  # stays until its standard input ends


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineProcess]]:
    """Start a supervised process whose first life is the first shell line, and so on; the last one is lived again and again."""
    monkeypatch.setattr(back_off, "FIRST_DELAY_S", 0.001)
    processes: list[EngineProcess] = []

    def start(*lives: str) -> EngineProcess:
        cases = "".join(f"{number}) {life} ;;\n" for number, life in enumerate(lives[:-1], start=1))
        program = tmp_path / "engine"
        count = f"n=$(cat {tmp_path}/lives 2>/dev/null || echo 0); n=$((n+1)); echo $n > {tmp_path}/lives"
        program.write_text(f"#!/bin/sh\n{count}\ncase $n in\n{cases}*) {lives[-1]} ;;\nesac\n")
        program.chmod(0o700)
        monkeypatch.setenv("EVERBATCH_PYTHON", str(program))
        process = EngineProcess(EngineConfig(), str(tmp_path / "engine.sock"))
        processes.append(process)
        process.start(10)
        return process

    yield start
    for process in processes:
        process.stop()


def is_up(process: EngineProcess, num_restarts: int) -> bool:
    """Whether the process of so many restarts has said that it is ready."""
    return wait_until(lambda: process.num_restarts == num_restarts and process._ready_at_s is not None, 10)


def test_it_is_given_up_after_the_last_restart_and_says_so(
    live: Callable[..., EngineProcess], caplog: pytest.LogCaptureFixture
) -> None:
    process = live(f"{READY}; exit 3")
    assert wait_until(lambda: process.has_given_up, 10)
    assert process.num_restarts == MAX_RESTARTS and process.num_deaths == MAX_RESTARTS + 1
    assert process.why_given_up in [record.message for record in caplog.records if record.levelno == logging.CRITICAL]


def test_an_error_of_a_later_start_is_not_the_end(live: Callable[..., EngineProcess]) -> None:
    """Only the first start's result decides whether the model loads at all."""
    process = live(f"{READY}; exit 3", """echo '{"error": "no memory at the moment"}'; exit 1""", f"{READY}; {STAY}")
    assert is_up(process, num_restarts=2)
    assert not process.has_given_up


def test_an_error_of_the_first_start_is_raised_and_nothing_is_started_again(live: Callable[..., EngineProcess]) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        live("""echo '{"error": "no such file"}'; exit 1""", f"{READY}; {STAY}")


def test_a_process_that_hangs_is_killed_and_started_again(live: Callable[..., EngineProcess]) -> None:
    """Not by a polite signal: a process that is stopped gets none."""
    process = live(f"trap '' TERM; {READY}; kill -STOP $$", f"{READY}; {STAY}")
    assert process.patience_s == EngineConfig().triton.watchdog_timeout_s
    assert process.longest_turn_s == EngineConfig().triton.step_timeout_s
    process.kill("gave no sign of life for 61 s, the limit is 60 s", 61.0)
    assert is_up(process, num_restarts=1)


def test_time_in_which_it_hung_does_not_count_as_quiet(
    live: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr(BackOff, "delay_after_end", lambda self, now_s, served_s: served.append(served_s) or 0.001)
    process = live(f"{READY}; {STAY}", f"{READY}; {STAY}")
    process.kill("hung", 1000.0)
    assert is_up(process, num_restarts=1)
    assert served[0] < -990


def test_while_it_loads_it_has_the_time_that_a_start_may_take(live: Callable[..., EngineProcess]) -> None:
    process = live(f"{READY}; exit 3", f"""echo '{{"phase": "loading"}}'; {STAY}""")
    assert wait_until(lambda: process.num_restarts == 1 and process.patience_s is not None, 10)
    assert process.patience_s == EngineConfig().triton.attach_timeout_s


def test_what_the_engine_remarks_is_a_warning_of_the_log_at_each_start(
    live: Callable[..., EngineProcess], caplog: pytest.LogCaptureFixture
) -> None:
    remark = """echo '{"remark": "it is 32 in this server"}'"""
    process = live(f"{remark}; {READY}; exit 3", f"{remark}; {READY}; {STAY}")
    assert is_up(process, num_restarts=1)
    told = [record for record in caplog.records if record.getMessage() == "remark: it is 32 in this server"]
    assert [(record.name, record.levelname) for record in told] == [("everbatch.supervisor", "WARNING")] * 2


def test_whatever_else_is_printed_does_not_end_the_supervision(live: Callable[..., EngineProcess]) -> None:
    noise = r"""printf '7\n[]\n\377\376\n{"x"\n'"""
    process = live(f"{noise}; {READY}; {noise}; exit 3", f"{READY}; {STAY}")
    assert is_up(process, num_restarts=1)


def test_a_restart_that_cannot_even_begin_is_tried_again(
    live: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = live(f"{READY}; {STAY}")
    popen, failures = supervisor.subprocess.Popen, [OSError(12, "Cannot allocate memory")]

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        if failures:
            raise failures.pop()
        return popen(*arguments, **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    process.kill("hung", 1.0)
    assert is_up(process, num_restarts=2)


def test_nothing_is_started_after_a_stop(live: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also when the stop comes just before a restart."""
    process = live(f"{READY}; {STAY}")
    process.stop()
    before = process.num_signs
    process._spawn()
    assert process.num_signs == before


def test_the_engine_process_finds_the_modules_of_its_user(
    live: Callable[..., EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Post-processors of logits are named as module:function. This package's own modules still come first."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    process = live(f"echo $PYTHONPATH > {tmp_path}/path; {READY}; {STAY}")
    assert is_up(process, 0)
    assert (tmp_path / "path").read_text().strip() == f"{supervisor.ROOT}:/of/the/user"


def test_a_process_that_cannot_be_started_is_an_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERBATCH_PYTHON", str(tmp_path / "no-such-program"))
    process = EngineProcess(EngineConfig(), str(tmp_path / "engine.sock"))
    held = process._kept.descriptors
    with pytest.raises(EngineUnavailable, match="the engine process cannot be started: No such file or directory"):
        process.start(10)
    assert held and [each for each in held if os.path.exists(f"/proc/self/fd/{each}")] == [], "the memory is given back"


POOL = r"""fd=$(echo "$*" | sed 's/.*--kv-pool \([0-9]*\).*/\1/')"""


def test_the_pool_outlives_engines_that_served_and_no_other(live: Callable[..., EngineProcess], tmp_path: Path) -> None:
    look = f"{POOL}; cat /proc/self/fd/$fd >> {tmp_path}/found; echo . >> {tmp_path}/found"
    process = live(
        f"{POOL}; printf kv > /proc/self/fd/$fd; {READY}; exit 3",
        f"{look}; {READY}; exit 3",
        f"{look}; exit 3",  # it may be the pool that ends it
        f"{look}; {READY}; {STAY}",
    )
    assert is_up(process, 3)
    assert (tmp_path / "found").read_text().split() == ["kv.", "kv.", "."]


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(kv_cache=KvCacheConfig(survives_engine=False)),
        EngineConfig(kv_cache=KvCacheConfig(enable_block_reuse=False)),
        EngineConfig(workers=WorkersConfig(tensor_parallel_size=2)),
        EngineConfig(workers=WorkersConfig(replicas=2)),
    ],
)
def test_no_memory_is_held_where_the_pool_ends_with_the_engine(config: EngineConfig) -> None:
    kept = KeptFiles.make(config)
    assert kept.pool is None and "--kv-pool" not in kept.arguments
    kept.close()
