"""Find and end every process of one server, whatever became of its parents. Standard library and Linux's /proc only.

Rule: each server is started with a random EVERBATCH_RUN_ID in its environment. Stubs, the engine process and the ranks
inherit it, so "ours" is a fact that can be read from /proc/PID/environ, also after a re-parenting to pid 1. Nothing is
ever found, and so nothing is ever killed, by name alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "EVERBATCH_RUN_ID"
STUB_NAME = "triton_python_backend_stub"
SHM_DIRECTORY = Path("/dev/shm")
_LISTENS = "0A"  # TCP_LISTEN


@dataclass(frozen=True)
class Process:
    """A process as it was seen; `start` (clock ticks after boot) tells it from a later one with the same pid."""

    pid: int
    start: int

    def alive(self) -> bool:
        """False once it is gone, a zombie, or its pid belongs to another process."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start == self.start and stat.state not in "ZX"


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    start: int


def read_stat(pid: int) -> Stat | None:
    """The fields of /proc/PID/stat that are used here; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # There is no such process, which None says.
        return None
    fields = text[text.rindex(")") + 2 :].split()  # The name of a process may hold spaces and brackets.
    return Stat(state=fields[0], parent=int(fields[1]), start=int(fields[19]))


def _read_proc(pid: int | str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # The process has gone meanwhile, or belongs to another user: in both cases it is none of ours.
        return b""


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def processes_of_run(run_id: str) -> list[Process]:
    """Every live process that carries `run_id` in its environment; zombies have none and are left out."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for pid in all_pids():
        if mark in _read_proc(pid, "environ").split(b"\0"):
            stat = read_stat(pid)
            if stat is not None and stat.state not in "ZX":
                found.append(Process(pid, stat.start))
    return found


def listener_on(port: int) -> int | None:
    """The process that listens on a TCP port, of those whose files this user may see."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in all_pids() if sockets else ():
        with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
            for file in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # It has just been closed.
                    if os.readlink(f"/proc/{pid}/fd/{file}") in sockets:
                        return pid
    return None


def _listening(port: int) -> Iterator[str]:
    """The inodes of sockets that listen on the port (proc(5), /proc/net/tcp)."""
    for table in ("tcp", "tcp6"):
        for line in _read_proc("self", f"net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def descends_from(pid: int, ancestor: int) -> bool:
    """True if `ancestor` is the process, or has started it, directly or through others."""
    while pid > 1:
        if pid == ancestor:
            return True
        stat = read_stat(pid)
        pid = stat.parent if stat is not None else 0
    return False


def stubs_of(server_pid: int) -> list[Process]:
    """The Python-backend stub processes that are children of `server_pid`."""
    found = []
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None and stat.parent == server_pid and stat.state not in "ZX":
            program = _read_proc(pid, "cmdline").split(b"\0", 1)[0].decode(errors="replace")
            if os.path.basename(program) == STUB_NAME:
                found.append(Process(pid, stat.start))
    return found


def model_of_stub(pid: int) -> str:
    """The Triton model of a stub, whose first argument is REPOSITORY/MODEL/VERSION/FILE; '' where it does not say."""
    arguments = _read_proc(pid, "cmdline").decode(errors="replace").split("\0")
    parts = Path(arguments[1]).parts if len(arguments) > 1 else ()
    return parts[-3] if len(parts) > 3 and parts[-2].isdecimal() else ""


def catches(pid: int, signal_number: int) -> bool:
    """True if the process has installed a handler for the signal (whose default action would kill it)."""
    for line in _read_proc(pid, "status").decode(errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def send_signal(process: Process, signal_number: int) -> None:
    """Signal the process unless it is gone or its pid has been given to another one."""
    if not process.alive():
        return
    with contextlib.suppress(
        ProcessLookupError
    ):  # It ended since the line above, so there is nothing to signal any more.
        os.kill(process.pid, signal_number)


def describe_end(status: int) -> str:
    """How a process ended, from its exit status as subprocess gives it: negative for the signal that ended it."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:  # Real-time signals have no names.
        name = ""
    return f"was ended by signal {-status}{name}"


def kill_run(
    run_id: str, timeout_s: float = 10.0, spare: Iterable[int] = (), known: Iterable[Process] = ()
) -> list[int]:
    """SIGKILL every process of a run until none is left, new ones and those `known` to be of it included. Returns the
    pids that outlived `timeout_s`.
    """
    spared, ours = set(spare), set(known)
    deadline = time.monotonic() + timeout_s
    while True:
        # `known` is needed because a process that is ending has no environment any more.
        ours.update(processes_of_run(run_id))
        left = [process for process in ours if process.pid not in spared and process.alive()]
        if not left or time.monotonic() > deadline:
            return [process.pid for process in left]
        for process in left:
            send_signal(process, signal.SIGKILL)
        time.sleep(0.02)  # Until it is over, any of them may start another one, so all are looked for again.


def shared_memory_files(prefix: str) -> list[Path]:
    """The shared memory regions whose names begin with `prefix` (each server is given one of its own)."""
    return sorted(path for path in SHM_DIRECTORY.glob("*") if path.name.startswith(prefix))


def remove_shared_memory(prefix: str) -> int:
    """Unlink the regions that killed stubs have left. Returns how many there were."""
    files = shared_memory_files(prefix)
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
