"""Flags of a child that must not stand in its command line, which every user of the machine can read.

tritonserver takes the admin key as a flag only. So the child is started with a mark in the flag's place (`@NAME`) and with
the flag itself in the environment variable NAME, which only this user can read. The child stops as it is executed, before
its first instruction (it is traced), its argv is pointed at the variable's text, and it goes on: at no moment is the flag
where `ps` looks. Where tracing is not allowed the flag stands in the command line, and the log says so.

Linux, 64 bits, little-endian.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "@"
_TRACEME, _DETACH = 0, 17
_WORD = struct.Struct("<Q")
_WAIT_S = 30.0


class NotTraced(Exception):
    """The child went on with its flags in its command line, or could not be stopped at all."""


def mark(name: str) -> str:
    """The placeholder in the command line for the flag that the variable `name` holds."""
    return MARK + name


def visible(command: list[str], variables: Mapping[str, str]) -> list[str]:
    """The command with the flags themselves in the places of their marks."""
    return [variables.get(word[1:], word) if word.startswith(MARK) else word for word in command]


def trace_me() -> bool:
    """In the child: stop at the next exec and wait for reveal() of the parent. False where that is not allowed."""
    return bool(_libc().ptrace(_TRACEME, 0, 0, 0) == 0)


def reveal(pid: int) -> None:
    """In the parent, in the thread that started the child: wait until it stops at its exec, give it its flags, let it go.

    Raises NotTraced when it runs untraced, and OSError when its memory cannot be written: then it must be killed, for its
    flags are not what was meant.
    """
    _wait_for_the_stop(pid)
    point_at_variables(pid)
    if _libc().ptrace(_DETACH, pid, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the server cannot be let go after its start")


def point_at_variables(pid: int) -> None:
    """Let each `@NAME` in the argv of a process that has not begun to run point at the text of its variable NAME."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third field on
    start_of_stack, env_start, env_end = int(fields[25]), int(fields[47]), int(fields[48])
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        where = _addresses(os.pread(memory, env_end - env_start, env_start), env_start)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for index, word in enumerate(words):
            if word.startswith(MARK.encode()) and word[1:] in where:
                # On the stack argc lies before argv[0].
                os.pwrite(memory, _WORD.pack(where[word[1:]]), start_of_stack + 8 * (index + 1))
    finally:
        os.close(memory)


def _addresses(environment: bytes, start: int) -> dict[bytes, int]:
    """Where the value of each variable begins."""
    found, position = {}, start
    for entry in environment.split(b"\0"):
        name = entry.split(b"=", 1)[0]
        found[name] = position + len(name) + 1
        position += len(entry) + 1
    return found


def _wait_for_the_stop(pid: int) -> None:
    """Wait until the child is stopped by its exec. If it ends instead, its exit status is left for its parent to collect."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        change = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if change is not None and change.si_code == os.CLD_TRAPPED and change.si_status == signal.SIGTRAP:
            return
        if change is not None and change.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            raise NotTraced("it has ended")
        if _runs_with_visible_flags(pid):
            raise NotTraced("tracing is not allowed here")
        time.sleep(0.001)  # A wait without WNOHANG would not see a child that runs on untraced, and has no time limit.
    raise NotTraced(f"it did not begin within {_WAIT_S:.0f} s")


def _runs_with_visible_flags(pid: int) -> bool:
    """True if it has been executed, and without marks. In the middle of an exec there is no command line at all."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return (
        words[0] != b"" and b"deploy.spawn" not in words and not any(word.startswith(MARK.encode()) for word in words)
    )


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.ptrace.restype = ctypes.c_long
    return library
