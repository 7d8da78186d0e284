"""Stand-ins of the modules socket, select, subprocess, signal, secrets and os, and of Path."""

from __future__ import annotations

import errno
import os as real_os
import signal as real_signal
import socket as real_socket
import subprocess as real_subprocess
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from tests.simulation.server.processes import PIPE_BYTES, MemoryFile, PipeEnd, Popen
from tests.simulation.server.sockets import USER, Bytes, Socket
from tests.simulation.server.threads import here


def _pipe() -> tuple[int, int]:
    process, content = here().current.process, Bytes(PIPE_BYTES)
    return process.open(PipeEnd(content, False)), process.open(PipeEnd(content, True))


def _end(number: int) -> Any:
    end = here().current.process.files.get(number)
    if end is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return end


def _read(number: int, limit: int) -> bytes:
    here().pause()
    if number == 0:
        return here().current.process.stdin.read(limit)
    end = _end(number)
    if not end.blocks and not end.content.is_readable:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return end.content.read(limit)


def _write(number: int, data: bytes) -> int:
    here().pause()
    end = _end(number)
    if not end.content.has_reader:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    size = end.content.put(data)
    if not size:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return size


def _close(number: int) -> None:
    end = _end(number)
    del here().current.process.files[number]
    end.drop()


def _file(number: int) -> MemoryFile:
    file = here().current.process.files.get(number)
    if file is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    assert isinstance(file, MemoryFile)
    return file


def _pread(number: int, size: int, at: int) -> bytes:
    return bytes(_file(number).data[at : at + size])


def _set_blocking(number: int, blocks: bool) -> None:
    _end(number).blocks = blocks


def _select(
    readers: Sequence[int], writers: Sequence[int], others: Sequence[int], timeout: float | None = None
) -> tuple[list[int], list[int], list[int]]:
    world = here()
    world.pause()
    (number,) = readers
    content = _end(number).content
    is_ready = world.wait_until(lambda: content.is_readable, content.readers, timeout, "select")
    return ([number] if is_ready else []), [], []


class _Environment(dict[str, str]):
    """os.environ of all processes: empty, and what one sets is for nobody."""


class _Module:
    """A module of which only some names are simulated. Anything else is an error, so that nothing real happens unseen."""

    def __init__(self, name: str, **names: Any) -> None:
        self.__dict__ |= names
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if here() is None:
            raise AttributeError(name)
        here().fail(f"{self._name}.{name} is not simulated; add it to tests/simulation/server/machine.py")


class FilePath(PurePosixPath):
    """Files of the simulated machine, in one dictionary. All directories exist."""

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        here().pause()

    def unlink(self, missing_ok: bool = False) -> None:
        here().pause()
        world = here()
        if world.listeners.pop(str(self), None) is None and world.written.pop(str(self), None) is None:
            if not missing_ok:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    def exists(self) -> bool:
        world, me = here(), str(self)
        return any(path == me or path.startswith(f"{me}/") for path in (*world.written, *world.listeners))

    def touch(self) -> None:
        here().pause()
        here().written.setdefault(str(self), b"")

    def write_bytes(self, data: bytes) -> None:
        here().pause()
        here().written[str(self)] = data

    def read_bytes(self) -> bytes:
        try:
            return here().written[str(self)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self)) from None


def _getpid() -> int:
    return here().current.process.pid


def _set_wakeup(number: int, warn_on_full_buffer: bool = True) -> None:
    here().current.process.wakeup = None if number < 0 else number


def _set_handler(number: int, handler: Callable[..., object]) -> None:
    here().current.process.handlers[number] = handler


socket = _Module(
    "socket",
    socket=Socket,
    AF_UNIX=real_socket.AF_UNIX,
    AF_INET=real_socket.AF_INET,
    SOCK_STREAM=real_socket.SOCK_STREAM,
    SOL_SOCKET=real_socket.SOL_SOCKET,
    SO_PEERCRED=real_socket.SO_PEERCRED,
    MSG_DONTWAIT=real_socket.MSG_DONTWAIT,
    SHUT_RDWR=real_socket.SHUT_RDWR,
)
select = _Module("select", select=_select)
subprocess = _Module(
    "subprocess", Popen=Popen, PIPE=real_subprocess.PIPE, TimeoutExpired=real_subprocess.TimeoutExpired
)
secrets = _Module(
    "secrets",
    token_hex=lambda size: here().secrets.randbytes(size).hex(),
    token_bytes=lambda size: here().secrets.randbytes(size),
)
signal = _Module(
    "signal",
    signal=_set_handler,
    set_wakeup_fd=_set_wakeup,
    SIGUSR1=real_signal.SIGUSR1,
    SIGTERM=real_signal.SIGTERM,
    SIGINT=real_signal.SIGINT,
    SIGKILL=real_signal.SIGKILL,
    SIG_IGN=real_signal.SIG_IGN,
)
os = _Module(
    "os",
    environ=_Environment(),
    path=real_os.path,
    pathsep=real_os.pathsep,
    fsdecode=real_os.fsdecode,
    getpid=_getpid,
    getppid=lambda: 1,
    getuid=lambda: USER,
    chmod=lambda path, mode: None,
    pipe=_pipe,
    read=_read,
    write=_write,
    close=_close,
    set_blocking=_set_blocking,
    memfd_create=lambda name: here().current.process.open(MemoryFile()),
    pread=_pread,
    pwrite=lambda number, data, at: _file(number).write(data, at),
    ftruncate=lambda number, size: _file(number).truncate(size),
    fstat=lambda number: SimpleNamespace(st_size=len(_file(number).data)),
    fsync=lambda number: here().pause(),
    _exit=lambda code: here().exit_process(code),
)
