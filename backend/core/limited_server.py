"""LimitedServer: does jobs in children of its process, which the kernel ends at their limits of processor time and memory.

    client (limited_process.py)  --Begin, Drop-->  LimitedServer  --fork, Begin-->  child: perform(task)
                                 <----Outcome----                 <----Outcome----

No library can be interrupted, and what a client sends may need any time and memory. A child starts within a millisecond, has
limits of its own and can be killed at any time. Forking is safe here, because the process has one thread and no torch, unlike
those that it works for. A child does one job and exits, or, where `jobs_of_child` says so, waits for the next one as long as
all goes well. When the client's end of the socket closes, the process ends together with its children.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from backend.api.errors import EverbatchError
from backend.api.processes.setup import set_up_logging
from backend.core.limited_messages import (
    READY,
    Begin,
    Drop,
    Ending,
    Frames,
    Limits,
    Outcome,
    decode_command,
    decode_outcome,
    frame,
)

log = logging.getLogger("everbatch.limited")
Perform = Callable[[Begin], Outcome]
_CHUNK = 1 << 20
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_OF_CPU = (signal.SIGPROF, signal.SIGXCPU)
_KEPT = (Ending.DONE, Ending.REFUSED)  # after which a child may go on
_libc = ctypes.CDLL(None)


@dataclass(slots=True, eq=False)
class _Child:
    pid: int
    link: socket.socket
    job: int | None = None  # None: it waits for one
    frames: Frames = field(default_factory=Frames)
    num_jobs: int = 0  # that it has been given


class LimitedServer:
    def __init__(
        self,
        connection: socket.socket,
        frames: Frames,
        perform: Perform,
        limits: Limits,
        *,
        niceness: int = 0,
        jobs_of_child: int = 1,
    ) -> None:
        """`frames`: holds bytes that were received with the first message. `perform` runs in a child."""
        self._connection, self._frames = connection, frames
        self._perform, self._limits, self._niceness = perform, limits, niceness
        self._jobs_of_child = jobs_of_child
        self._children: dict[int, _Child] = {}  # children at work, by the numbers of their jobs
        self._idle: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._listen)
        self._is_over = False

    def run(self) -> None:
        """Serve until the client's end of the socket closes."""
        self._obey()
        while not self._is_over:
            for key, _ in self._selector.select():
                key.data()
        for child in [*self._children.values(), *self._idle]:
            self._kill(child)

    def _listen(self) -> None:
        data = receive(self._connection)
        self._is_over = not data
        self._frames.add(data)
        self._obey()

    def _obey(self) -> None:
        for body in self._frames:
            match decode_command(body):
                case Begin() as begin:
                    self._begin(begin)
                case Drop(job) if (child := self._children.get(job)) is not None:
                    self._kill(child)

    def _begin(self, begin: Begin) -> None:
        try:
            child = self._idle.pop() if self._idle else self._fork()
        except OSError as error:
            log.error("no process for a job can be started: %s", error.strerror)
            self.tell(Outcome(begin.job, Ending.LOST))
            return
        child.job = begin.job
        child.num_jobs += 1
        self._children[begin.job] = child
        with contextlib.suppress(OSError):  # it has died; the end of its stream says so
            child.link.sendall(frame(begin))

    def _fork(self) -> _Child:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if not pid:
                self._connection.close()
                ours.close()
                self._work_and_exit(theirs, parent)
        child = _Child(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, child))
        return child

    def _hear(self, child: _Child) -> None:
        """Pass on the outcome of a child, or an outcome for the way in which it died."""
        if child.link.fileno() < 0:
            return  # it was killed after its stream became readable
        data = receive(child.link)
        child.frames.add(data)
        for body in child.frames:
            outcome = decode_outcome(body)
            self.tell(outcome)
            self._rest(child, outcome)
        if not data:
            job = child.job
            status = self._part_from(child)
            if job is not None:
                self.tell(_of_death(job, status))

    def _rest(self, child: _Child, outcome: Outcome) -> None:
        """A child has sent its outcome: it waits for the next job, or ends by itself."""
        self._children.pop(outcome.job, None)
        child.job = None
        if outcome.ending in _KEPT and child.num_jobs < self._jobs_of_child:
            self._idle.append(child)

    def tell(self, outcome: Outcome) -> None:
        with contextlib.suppress(OSError):  # the client has gone; the next read of the socket notices
            self._connection.sendall(frame(outcome))

    def _kill(self, child: _Child) -> None:
        os.kill(child.pid, signal.SIGKILL)
        self._part_from(child)

    def _part_from(self, child: _Child) -> int:
        """Reap a child that has ended or was killed. Returns its exit code, or minus the signal that ended it."""
        if child.job is not None:
            del self._children[child.job]
        if child in self._idle:
            self._idle.remove(child)
        self._selector.unregister(child.link)
        child.link.close()
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])

    # ---- in a child --------------------------------------------------------------------------------------------------

    def _work_and_exit(self, link: socket.socket, parent: int) -> NoReturn:
        """Do jobs, send their outcomes, and exit without Python's clean-up."""
        try:
            _silence()
            _end_with(parent)
            os.nice(self._niceness)
            _limit_memory(self._limits.num_bytes)
            frames = Frames()
            for _ in range(self._jobs_of_child):
                outcome = self._outcome_of(_next_job(link, frames))
                link.sendall(frame(outcome))
                if outcome.ending not in _KEPT:
                    break
            os._exit(0)
        finally:
            os._exit(1)

    def _outcome_of(self, begin: Begin) -> Outcome:
        _limit_cpu(self._limits.cpu_s)
        outcome = outcome_of(self._perform, begin)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if (
            outcome.num_bytes > self._limits.num_bytes
        ):  # memory that was reserved before the fork is not the kernel's to count
            return Outcome(outcome.job, Ending.OVER_MEMORY)
        return outcome


def outcome_of(perform: Perform, begin: Begin) -> Outcome:
    try:
        return perform(begin)
    except MemoryError:
        return Outcome(begin.job, Ending.OVER_MEMORY)
    except BaseException:  # any failure of a library, Rust panics included, goes to the log
        return Outcome(begin.job, Ending.FAILED, text=traceback.format_exc())


def _next_job(link: socket.socket, frames: Frames) -> Begin:
    while True:
        for body in frames:
            begin = decode_command(body)
            assert isinstance(begin, Begin)  # a drop kills
            return begin
        if not (data := receive(link)):
            os._exit(0)
        frames.add(data)


def _of_death(job: int, status: int) -> Outcome:
    """The outcome for a child that died before it sent one."""
    if -status in _OF_CPU:
        return Outcome(job, Ending.OVER_CPU)
    if -status == signal.SIGABRT:  # a library that cannot handle a failed allocation aborts
        return Outcome(job, Ending.OVER_MEMORY)
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return Outcome(job, Ending.FAILED, text=f"the process of a job ended with {name}")


def _silence() -> None:
    """Keep what a failing library prints out of the log."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _end_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends. A parent that ended before it was asked sends no signal."""
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + num_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def _limit_cpu(cpu_s: float) -> None:
    """Let the kernel end this process when it has taken so much more processor time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(used + cpu_s) + 2  # in case a library masks the timer's signal
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _lower(kind: int, most: int) -> None:
    """Lower a resource limit of this process, unless it is lower already."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def receive(connection: socket.socket) -> bytes:
    """Receive the next bytes; b'' at the end of the stream."""
    try:
        return connection.recv(_CHUNK)
    except OSError:
        return b""


def first_message(connection: socket.socket, frames: Frames) -> bytes | None:
    """The body of the first message; None if the connection ends before it. `frames` holds what came behind it."""
    while data := receive(connection):
        frames.add(data)
        for body in frames:
            return body
    return None


def serve_jobs(
    name: str, set_up: Callable[[bytes], tuple[Perform, Limits]], *, niceness: int = 0, jobs_of_child: int = 1
) -> int:
    """The main function of a process that is started with its end of a socket pair as its only argument. Returns its exit code.

    `name` stands in its log lines. `set_up` is called with the body of the first message, and its objects are shared with
    all children. If it raises EverbatchError, the process exits with 1: the client fails on the same material and reports it.
    """
    set_up_logging(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with its client
    connection, frames = socket.socket(fileno=int(sys.argv[1])), Frames()
    if (body := first_message(connection, frames)) is None:
        return 0
    try:
        perform, limits = set_up(body)
    except EverbatchError:
        return 1
    gc.collect()
    gc.freeze()
    server = LimitedServer(connection, frames, perform, limits, niceness=niceness, jobs_of_child=jobs_of_child)
    server.tell(Outcome(READY, Ending.DONE))
    server.run()
    return 0
