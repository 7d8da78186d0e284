"""Stacks as large as the memory, and no larger than what is counted allows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT, memory


def test_a_stack_is_half_of_the_memory() -> None:
    assert memory._stack_bytes(32 << 30, None) == 16 << 30
    assert memory.stack_bytes() <= max(memory.MIN_STACK_BYTES, memory.total_bytes() // 2)


def test_all_stacks_fit_into_the_address_space_of_the_largest_machine() -> None:
    assert memory._stack_bytes(12 << 40, None) * memory.THREADS <= 1 << 47


def test_where_address_space_is_counted_the_stacks_take_half_of_it_but_no_less_than_usual() -> None:
    assert memory._stack_bytes(32 << 30, 64 << 30) * memory.THREADS == 32 << 30
    assert memory._stack_bytes(32 << 30, 1 << 30) == 8 << 20


def test_a_limit_on_address_space_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.memory.resource.getrlimit", lambda which: (5 << 40, -1))
    found = memory._countable_address_space()
    assert found is not None and found <= 5 << 40


def test_a_container_with_little_memory_counts_instead_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = memory.total_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_bytes() == machine
    (tmp_path / "memory.max").write_text(f"{256 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{56 << 20}\n")
    assert memory.total_bytes() == 256 << 20
    here = os.getpid()
    assert abs(memory.limit_bytes(here) - memory.resident_bytes(here) - (100 << 20)) < 16 << 20


def spawned(code: str, stack: int, before: str = "") -> str:
    """What Python code prints that deploy.spawn has started with this stack, with `before` run in its parent."""
    spawn = f"[{sys.executable!r}, '-P', '-m', 'deploy.spawn', str(os.getpid()), '{stack}', {sys.executable!r}, '-c', {code!r}]"
    parent = f"import os, resource, subprocess; {before}\nprint(subprocess.run({spawn}, capture_output=True, text=True).stdout)"
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=True
    )
    return done.stdout.strip()


STACK = 64 << 20
SOFT = "import resource; print(resource.getrlimit(resource.RLIMIT_STACK)[0])"


def test_a_stack_limit_is_raised_and_never_lowered() -> None:
    assert spawned(SOFT, STACK) == str(STACK)
    assert spawned(SOFT, 0) == str(resource.getrlimit(resource.RLIMIT_STACK)[0])


def test_no_stack_limit_is_taken_for_the_two_megabytes_that_it_means_to_threads() -> None:
    unlimited = "resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine does not allow an unlimited stack")
    assert spawned(SOFT, STACK, unlimited) == str(STACK)


def test_children_of_the_server_get_the_usual_stack_again() -> None:
    code = (
        "import resource, subprocess, sys, threading; resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, -1))\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start(); print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        f"subprocess.run([sys.executable, '-c', {SOFT!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        memory.spare_children_the_stack(child.pid)
        out, _ = child.communicate("\n", timeout=60)
    assert out.strip() == str(resource.getrlimit(resource.RLIMIT_STACK)[0])


def test_a_process_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    monkeypatch.setattr("deploy.memory.time.sleep", lambda seconds: pytest.fail("it waits"))
    memory.spare_children_the_stack(child.pid)
    child.wait()
    memory.spare_children_the_stack(child.pid)
