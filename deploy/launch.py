"""Starts the processes of a server: tritonserver itself, and the janitor that cleans up behind a launcher that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from deploy import ROOT, log_files, memory, secret_flags


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
