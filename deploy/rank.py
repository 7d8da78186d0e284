"""The `rank` command: a rank of a model whose rank 0 runs on another machine (docs/scale.md).

The rank itself is a process of its own, `python -m backend.worker.joined_rank`. When its group ends, because rank 0 or another
rank was lost, it is started again and joins the next group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from backend.api.config.endpoints import check_address
from backend.api.errors import ConfigError
from backend.api.processes.back_off import BackOff
from backend.api.processes.launched import launched
from deploy import ROOT
from deploy.errors import UserError

REFUSED = 2  # exit status of a rank that need not try again


@dataclass(frozen=True)
class RankOptions:
    """The options of `rank`, as given."""

    join: str = ""  # HOST:PORT; empty: torchrun, mpirun or srun has set the environment
    timeout_s: float = 600.0  # for rank 0 to answer
    once: bool = False  # end with the first group


def run_rank(options: RankOptions) -> int:
    """Returns the exit status. Raises UserError for options that cannot be."""
    command = command_of(options, os.environ)
    back_off = BackOff(max_restarts=None)
    while True:
        started = time.monotonic()
        status = _run(command)
        now = time.monotonic()
        if status < 0:  # Ctrl-C, or SIGTERM
            return 0
        if status == REFUSED or options.once:
            return min(status, 1)
        time.sleep(back_off.delay_after_end(now, served_s=now - started) or 0)


def command_of(options: RankOptions, environment: Mapping[str, str]) -> list[str]:
    """Raises UserError."""
    command = [sys.executable, "-m", "backend.worker.joined_rank", "--timeout", f"{options.timeout_s:g}"]
    try:
        if options.join:
            check_address("--join", options.join)
            return [*command, "--join", options.join]
        found = launched(environment)
    except ConfigError as error:
        raise UserError(error.message) from None
    if found is None:
        raise UserError(
            "the address of rank 0 is missing; give --join HOST:PORT, its workers.join_address, or use torchrun, mpirun "
            "or srun"
        )
    if found.rank == 0:
        raise UserError(
            "this process is rank 0, which leads; run ./everbatch serve with --set workers.join_address=env here"
        )
    return [*command, "--join", found.address, "--rank", str(found.rank), "--num-ranks", str(found.num_ranks)]


def _run(command: list[str]) -> int:
    """The exit status of a process; -1 when this one was asked to end, and has ended it."""
    with subprocess.Popen([*command, "--parent", str(os.getpid())], cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        asked: list[int] = []

        def end(number: int, _: object) -> None:
            asked.append(number)
            process.terminate()

        previous = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            status = process.wait()
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)
    return -1 if asked else abs(status)
