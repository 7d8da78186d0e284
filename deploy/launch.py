"""Starts the processes of a server: tritonserver itself, and the janitor that cleans up behind a launcher that was killed.

It also raises the limit of open files, which they inherit.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from deploy import ROOT, log_files, memory, secret_flags

# Files that this process and its children may have open: every connection of a client is one.
WANTED_FILES = 65536
NEEDED_FILES = 2048  # for a server, its endpoint, and some hundred clients of each


def start_server(command: list[str], variables: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """tritonserver, writing into a new log, with its secret flags out of sight where that is allowed. Raises OSError when it
    cannot be executed.
    """
    with log_files.begin(log_path) as log:
        process = _spawn(command, variables, log)
        try:
            secret_flags.reveal(process.pid)
        except secret_flags.NotTraced:
            pass  # It runs with its flags in sight and has said so in the log, or it has ended, which is seen later.
        except OSError as error:
            process.kill()
            process.wait()
            log.write(f"everbatch: every user of this machine sees the admin key ({error.strerror})\n".encode())
            process = _spawn(secret_flags.visible(command, variables), variables, log)
    return process


def start_janitor(run_id: str, shm_prefix: str, directory: Path | None) -> subprocess.Popen[bytes]:
    """Start the janitor. Once its standard input ends, it ends what is left of the run, and removes its shared memory and
    `directory`.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "deploy.janitor",
            run_id,
            shm_prefix,
            *([] if directory is None else [str(directory)]),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone.
        env={"PYTHONPATH": str(ROOT)},
    )


def _spawn(command: list[str], variables: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    spawn = [sys.executable, "-P", "-m", "deploy.spawn", str(os.getpid()), str(memory.stack_bytes())]
    return subprocess.Popen(
        spawn + command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=variables,
    )


def raise_open_files() -> str | None:
    """Raise the soft limit as far as the hard one allows, for this process and what it starts. Returns what to know where that
    is too low, None where it is enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= NEEDED_FILES:
        return None
    return (
        f"warning: a process may have {soft} files open here, and every client's connection is one: with that many clients "
        f"further ones get no answer; allow {NEEDED_FILES} or more (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of "
        "docker)"
    )
