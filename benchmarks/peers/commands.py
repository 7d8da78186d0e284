"""Long commands (pip, converters, compilers): progress while they run, and no process of theirs is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import ROOT
from deploy.packages import lines_or_ticks
from deploy.progress import SteppedProgress


class CommandFailed(Exception):
    """`output`: all lines the command wrote."""

    def __init__(self, status: int, output: list[str]) -> None:
        super().__init__(output[-1].strip() if output else f"it ended with status {status} and said nothing")
        self.output = output


def start(command: Sequence[str], environment: Mapping[str, str], **popen: Any) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a process group of its own; the leader is killed should this process die."""
    spawn = [sys.executable, "-m", "deploy.spawn", str(os.getpid()), "0", *command]
    variables = {**os.environ, **environment}
    variables.pop("PYTHONPATH", None)  # it belongs to our environment; the command may belong to another
    return subprocess.Popen(spawn, cwd=ROOT, env=variables, start_new_session=True, **popen)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a command of `start` and all its children. It must not have been waited for: its pid is then still its own."""
    os.killpg(process.pid, number)


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a command of `start` and all its children. Returns its exit status, its own if it had ended before."""
    signal_group(process, signal.SIGKILL)
    return process.wait()


def run(
    command: Sequence[str],
    progress: SteppedProgress,
    title: str,
    describe: Callable[[str], str | None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> list[str]:
    """Run to the end and return the lines it wrote (to `log` too), without empty ones.

    `describe`: what a line says to a person, or None.

    Raises CommandFailed.
    """
    progress.step(title)
    progress.note("at work")
    process = start(
        command, environment or {}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output: list[str] = []
    try:
        for line in lines_or_ticks(process.stdout.fileno()):
            if line is None:
                progress.tick()
                continue
            if line:
                output.append(line)
            if text := describe(line):
                progress.note(text)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        status = end(process)
        process.stdout.close()
        if log is not None:
            log.write_text("\n".join(output) + "\n")
    if status != 0:
        raise CommandFailed(status, output)
    return output
