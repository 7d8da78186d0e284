"""The process that compiles guides: `python -m backend.guided.compile_process FD`, FD being its end of a socket pair.

It imports the library and reads the vocabulary once, then forks a child for each guide. A child starts within a millisecond, has
limits of its own and can be killed at any time, and its memory is that of one guide. Forking is safe here, because the process
has one thread and no torch, unlike the engine process.

A child compiles, writes its outcome to a pipe and exits. It is niced, so that it does not slow the steps of the model. When the
engine's end of the socket closes, the process ends together with its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from backend.api.errors import EverbatchError
from backend.api.guide import Guide, GuideType
from backend.api.log_lines import set_up_logging
from backend.guided.compile_messages import (
    READY,
    Begin,
    Drop,
    Ending,
    Frames,
    Outcome,
    Setup,
    decode_command,
    decode_outcome,
    frame,
)
from backend.guided.protocol import GuideBackend, GuideError

log = logging.getLogger("everbatch.guided")
NICENESS = 5
_CHUNK = 1 << 20
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_OF_CPU = (signal.SIGPROF, signal.SIGXCPU)
_libc = ctypes.CDLL(None)


class _Heap(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc.mallinfo2.restype = _Heap


def allocated_bytes() -> int:
    """Bytes that this process has allocated with malloc and not freed."""
    heap = _libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@dataclass(slots=True)
class _Child:
    job: int
    pid: int
    pipe: int
    frames: Frames = field(default_factory=Frames)
    has_sent: bool = False  # True once it has sent its outcome


class CompileServer:
    def __init__(self, connection: socket.socket, frames: Frames, backend: GuideBackend, setup: Setup) -> None:
        """`frames`: holds bytes that were received with the first message."""
        self._connection, self._frames = connection, frames
        self._backend, self._setup = backend, setup
        self._children: dict[int, _Child] = {}  # by job number
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._listen)
        self._is_over = False

    def run(self) -> None:
        """Serve until the engine's end of the socket closes."""
        self._obey()
        while not self._is_over:
            for key, _ in self._selector.select():
                key.data()
        for job in list(self._children):
            self._drop(job)

    def _listen(self) -> None:
        data = _receive(self._connection)
        self._is_over = not data
        self._frames.add(data)
        self._obey()

    def _obey(self) -> None:
        for body in self._frames:
            match decode_command(body):
                case Begin() as begin:
                    self._begin(begin)
                case Drop(job):
                    self._drop(job)

    def _begin(self, begin: Begin) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            log.error("no process for a guide can be started: %s", error.strerror)
            self.tell(Outcome(begin.job, Ending.LOST))
        else:
            if not pid:
                self._connection.close()
                _compile_and_exit(self._backend, begin, writing, self._setup, parent)
            child = self._children[begin.job] = _Child(begin.job, pid, reading)
            self._selector.register(reading, selectors.EVENT_READ, lambda: self._hear(child))
        os.close(writing)

    def _hear(self, child: _Child) -> None:
        """Pass on the outcome of a child, or an outcome for the way in which it died."""
        if self._children.get(child.job) is not child:
            return  # it was dropped after its pipe became readable
        data = os.read(child.pipe, _CHUNK)
        child.frames.add(data)
        for body in child.frames:
            child.has_sent = True  # only the end of the pipe follows
            self.tell(decode_outcome(body))
        if not data:
            status = self._part_from(child)
            if not child.has_sent:
                self.tell(_of_death(child.job, status))

    def tell(self, outcome: Outcome) -> None:
        with contextlib.suppress(OSError):  # the engine has gone; the next read of the socket notices
            self._connection.sendall(frame(outcome))

    def _drop(self, job: int) -> None:
        child = self._children.get(job)
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)
            self._part_from(child)

    def _part_from(self, child: _Child) -> int:
        """Reap a child that has ended or was killed. Returns its exit code, or minus the signal that ended it."""
        del self._children[child.job]
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])


def _of_death(job: int, status: int) -> Outcome:
    """The outcome for a child that died before it sent one."""
    if -status in _OF_CPU:
        return Outcome(job, Ending.OVER_CPU)
    if -status == signal.SIGABRT:  # a library that cannot handle a failed allocation aborts
        return Outcome(job, Ending.OVER_MEMORY)
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return Outcome(job, Ending.FAILED, text=f"the process of a guide ended with {name}")


def _compile_and_exit(backend: GuideBackend, begin: Begin, pipe: int, setup: Setup, parent: int) -> NoReturn:
    """In the child: compile, write the outcome, and exit without Python's clean-up."""
    try:
        _silence()
        _end_with(parent)
        _limit(setup.cpu_s, setup.num_bytes)
        framed = frame(_within(setup.num_bytes, outcome_of(backend, begin)))
        while framed:
            framed = framed[os.write(pipe, framed) :]
        os._exit(0)
    finally:
        os._exit(1)


def _lower(kind: int, most: int) -> None:
    """Lower a resource limit of this process, unless it is lower already."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _within(num_bytes: int, outcome: Outcome) -> Outcome:
    """Enforce the limit for memory that was reserved before the fork, which the kernel does not count."""
    return Outcome(outcome.job, Ending.OVER_MEMORY) if outcome.num_bytes > num_bytes else outcome


def _silence() -> None:
    """Keep what a failing library prints out of the engine's log."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _end_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends. A parent that ended before it was asked sends no signal."""
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(cpu_s: float, num_bytes: int) -> None:
    """Set limits of CPU time and memory that the kernel enforces."""
    os.nice(NICENESS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    _lower(resource.RLIMIT_AS, most)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, int(cpu_s) + 2)  # in case a library masks the timer's signal
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def outcome_of(backend: GuideBackend, begin: Begin) -> Outcome:
    """Compile a guide and measure the memory that it holds."""
    before = allocated_bytes()
    try:
        compiled = backend.compile(begin.guide)
        held = max(0, allocated_bytes() - before)
        return Outcome(begin.job, Ending.COMPILED, compiled.portable, held)
    except GuideError as error:
        return Outcome(begin.job, Ending.REFUSED, text=str(error), place=error.place)
    except MemoryError:
        return Outcome(begin.job, Ending.OVER_MEMORY)
    except BaseException:  # any failure of the library, Rust panics included, goes to the engine's log
        return Outcome(begin.job, Ending.FAILED, text=traceback.format_exc())


def _receive(connection: socket.socket) -> bytes:
    """Receive the next bytes; b'' at the end of the stream."""
    try:
        return connection.recv(_CHUNK)
    except ConnectionError:
        return b""


def _read_setup(connection: socket.socket, frames: Frames) -> Setup | None:
    """Read the first message; None if the connection ends before it."""
    while data := _receive(connection):
        frames.add(data)
        for body in frames:
            setup = decode_command(body)
            assert isinstance(setup, Setup)  # the engine's first message
            return setup
    return None


def main() -> int:
    set_up_logging("guides")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with the engine
    connection, frames = socket.socket(fileno=int(sys.argv[1])), Frames()
    setup = _read_setup(connection, frames)
    if setup is None:
        return 0
    try:
        backend = setup.materials.make()
    except EverbatchError:  # the engine fails on the same materials and reports it
        return 1
    with contextlib.suppress(GuideError):
        backend.compile(Guide(GuideType.JSON))  # so that children need not initialise the library
    gc.collect()
    gc.freeze()
    gc.disable()
    server = CompileServer(connection, frames, backend, setup)
    server.tell(Outcome(READY, Ending.COMPILED))
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
