"""A secret flag reaches the child and never stands in its command line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deploy import ROOT, secret_flags

SAY_AND_WAIT = "import sys; print(sys.argv[1:], flush=True); sys.stdin.read()"
VARIABLES = {"EVERBATCH_TEST_FLAG": "--restricted=api:header=s3cret", "OTHER": "x"}


def spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "deploy.spawn", str(os.getpid()), "0"]
    return subprocess.Popen(
        [*command, sys.executable, "-c", SAY_AND_WAIT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**VARIABLES, "PYTHONPATH": str(ROOT)},
    )


def test_the_child_reads_the_flag_and_nobody_else_ever_sees_it() -> None:
    seen: set[bytes] = set()
    with spawn("before", "@EVERBATCH_TEST_FLAG", "@NO_SUCH", "after") as child:
        assert child.stdin is not None and child.stdout is not None
        looking = threading.Event()
        end = threading.Event()

        def look() -> None:
            while not end.is_set():
                seen.add(Path(f"/proc/{child.pid}/cmdline").read_bytes())
                looking.set()

        thread = threading.Thread(target=look)
        thread.start()
        looking.wait()
        secret_flags.reveal(child.pid)
        said = child.stdout.readline()
        end.set()
        thread.join()
        child.stdin.close()
    assert said.strip() == "['before', '--restricted=api:header=s3cret', '@NO_SUCH', 'after']"
    assert child.returncode == 0
    assert any(b"@EVERBATCH_TEST_FLAG" in line and b"deploy.spawn" not in line for line in seen)
    assert not any(b"s3cret" in line for line in seen)


def test_a_command_without_marks_is_not_traced() -> None:
    with spawn("plain") as child:
        assert child.stdin is not None and child.stdout is not None
        with pytest.raises(secret_flags.NotTraced):
            secret_flags.reveal(child.pid)
        assert child.stdout.readline().strip() == "['plain']"
        child.stdin.close()


def test_a_child_that_ends_before_its_exec_is_left_to_whoever_waits_for_it() -> None:
    command = [sys.executable, "-P", "-m", "deploy.spawn", "1", "0", "/bin/echo", "@EVERBATCH_TEST_FLAG"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, env={**VARIABLES, "PYTHONPATH": str(ROOT)})
    with pytest.raises(secret_flags.NotTraced):
        secret_flags.reveal(child.pid)
    assert b"launcher" in child.communicate()[1]
    assert child.returncode == 1


def test_where_tracing_is_not_allowed_marks_become_the_flags_themselves() -> None:
    command = ["server", "--port=1", secret_flags.mark("EVERBATCH_TEST_FLAG"), "@NO_SUCH"]
    assert secret_flags.visible(command, VARIABLES) == [
        "server",
        "--port=1",
        VARIABLES["EVERBATCH_TEST_FLAG"],
        "@NO_SUCH",
    ]
