"""RankFollowers: the ranks besides rank 0. They are children of its process (rank_process.py), or have joined it (joining.py).

A child is started by the thread that then waits for its end, because the kernel kills a child of PR_SET_PDEATHSIG when the thread
that started it ends. That thread also makes the native step wait no longer for a rank that has ended.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from backend.api.errors import ConfigError
from backend.core.step import WorkersLost
from backend.worker.rank_messages import (
    Failed,
    FromRank,
    Load,
    Loaded,
    MakePool,
    Measure,
    Measured,
    Progress,
    ToRank,
    receive_answer,
    send,
)
from kernels.cpu.ranks import RanksMemory

log = logging.getLogger("everbatch.worker")
ROOT = Path(__file__).resolve().parents[2]
STOP_GRACE_S = 5.0


class RankFollower:
    """One rank's process, and the socket to it."""

    def __init__(self, rank: int, on_end: Callable[[int], None]) -> None:
        """Start the process. on_end: called with the rank, on another thread, once the process has ended.

        Raises OSError when it cannot be started.
        """
        self.rank, self._on_end = rank, on_end
        self.socket, self._other_end = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"everbatch-rank-{rank}", daemon=True)
        self._thread.start()
        self._started.wait()
        self._other_end.close()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        assert self._process is not None  # it has been started
        return self._process.pid

    @property
    def who(self) -> str:
        return f"process {self.pid}"

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    @property
    def end(self) -> str:
        """How the process ended, or that it has not answered: the end of a sentence."""
        self._thread.join(1.0)  # the process may just be ending
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "does not answer"
        return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"

    def stop(self) -> None:
        """End the process, by force if it does not end at once by itself. Safe to call twice."""
        self.socket.close()
        self._thread.join(STOP_GRACE_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        descriptor = self._other_end.fileno()
        module = [sys.executable, "-m", "backend.worker.rank_process"]
        try:
            self._process = subprocess.Popen(
                [*module, "--rank", str(self.rank), "--socket", str(descriptor), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output of the engine process is the way to its supervisor
                env={**os.environ, "PYTHONPATH": search_path},
                pass_fds=[descriptor],
            )
        except OSError as error:
            self._error = error
        self._started.set()
        if self._process is not None:
            self._process.wait()
            self._on_end(self.rank)


class AnyRankFollower(Protocol):
    """A rank, and the socket to it."""

    rank: int
    socket: socket.socket

    @property
    def pid(self) -> int | None:
        """The process of the rank, if this process has started it."""
        ...

    @property
    def who(self) -> str:
        """Which process it is, for a message."""
        ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def end(self) -> str:
        """How it ended, or that it has not answered: the end of a sentence."""
        ...

    def stop(self) -> None:
        """Safe to call twice."""
        ...


class RankFollowers:
    """All ranks besides rank 0. One thread calls the methods."""

    def __init__(
        self,
        loads: Sequence[Load],
        load_timeout_s: float,
        step_timeout_s: float,
        joined: Sequence[AnyRankFollower] | None = None,
    ) -> None:
        """Let a rank load each of `loads`, while this process goes on. joined: those ranks; None: processes that are started.

        load_timeout_s: for the next sign of life while it loads. step_timeout_s: until it must have taken a message.
        Raises ConfigError when a process cannot be started.
        """
        self._load_timeout_s, self._step_timeout_s = load_timeout_s, step_timeout_s
        self._memory: RanksMemory | None = None
        self._stopping = False
        self._all: list[AnyRankFollower] = list(joined or ())
        if joined is None:
            self._start(loads)
        for follower, load in zip(self._all, loads, strict=True):
            follower.socket.settimeout(load_timeout_s)
            with suppress(OSError):  # it has ended; `wait_until_loaded` says how
                send(follower.socket, load)

    def _start(self, loads: Sequence[Load]) -> None:
        for load in loads:
            try:
                self._all.append(RankFollower(load.shard.number, self._on_end))
            except OSError as error:
                self.stop()
                raise ConfigError(
                    f"rank {load.shard.number} cannot be started ({error.strerror or error}); start fewer ranks (docs/scale.md)"
                ) from None

    @property
    def pids(self) -> list[int]:
        """The processes that were started."""
        return [follower.pid for follower in self._all if follower.pid is not None]

    @property
    def share_memory(self) -> bool:
        """True if they read rank 0's token ids and block tables where it writes them."""
        return self._memory is not None and self._memory.is_shared

    def wait_until_loaded(self, progress: Callable[[str], None]) -> list[Loaded]:
        """Raises ConfigError with what a rank says, or how it ended."""
        answers = [self._answer(follower, progress) for follower in self._all]
        return [answer for answer in answers if isinstance(answer, Loaded)]

    def measure(self) -> list[int]:
        """Free bytes on the machine of each rank. Raises ConfigError."""
        for follower in self._all:
            self._send(follower, Measure())
        answers = [self._answer(follower) for follower in self._all]
        return [answer.free_bytes for answer in answers if isinstance(answer, Measured)]

    def share(self, memory: RanksMemory) -> None:
        """Mark ranks that end as lost in this memory, from now on."""
        self._memory = memory

    def make_pool(self, pool: MakePool, descriptors: Sequence[int] = ()) -> None:
        """descriptors: of the memory that all map, where they do. Raises WorkersLost."""
        for follower in self._all:
            self._send(follower, pool, descriptors)

    def wait_for_pool(self) -> None:
        """Raises ConfigError."""
        for follower in self._all:
            self._answer(follower)
            follower.socket.settimeout(self._step_timeout_s)

    def tell(self, message: ToRank) -> None:
        """Tell all ranks the same. Raises WorkersLost."""
        for follower in self._all:
            self._send(follower, message)

    def tell_each(self, messages: Sequence[ToRank]) -> None:
        """Raises WorkersLost."""
        for follower, message in zip(self._all, messages, strict=True):
            self._send(follower, message)

    def check(self) -> None:
        """Raise WorkersLost if a process has ended."""
        for follower in self._all:
            if follower.has_ended:
                raise self.lost(follower.rank)

    def lost(self, rank: int) -> WorkersLost:
        """The error that says what became of a rank."""
        if rank == 0:  # the other ranks have waited in vain, and have ended
            return WorkersLost(f"rank 0 kept the others waiting for more than {self._step_timeout_s:g} s")
        follower = self._all[rank - 1]
        return WorkersLost(f"rank {rank} ({follower.who}) {follower.end}")

    def stop(self) -> None:
        """End all processes. Safe to call twice."""
        self._stopping = True
        for follower in self._all:
            follower.socket.close()  # they end at the same time
        for follower in self._all:
            follower.stop()
        self._memory = None

    def _send(self, follower: AnyRankFollower, message: ToRank, descriptors: Sequence[int] = ()) -> None:
        try:
            send(follower.socket, message, descriptors)
        except OSError:
            raise self.lost(follower.rank) from None

    def _answer(self, follower: AnyRankFollower, progress: Callable[[str], None] = lambda line: None) -> FromRank:
        """The rank's next message that is neither progress nor a failure."""
        while True:
            try:
                answer = receive_answer(follower.socket)
            except TimeoutError:
                raise ConfigError(
                    f"rank {follower.rank} gave no sign of life for {self._load_timeout_s:g} s while it was loading; raise "
                    f"triton.attach_timeout_s if the machine is slow"
                ) from None
            except (EOFError, OSError):
                raise ConfigError(
                    f"rank {follower.rank} {follower.end} while it was loading; its lines in the log say why"
                ) from None
            if isinstance(answer, Failed):
                raise ConfigError(
                    answer.message if follower.pid else f"rank {follower.rank} {follower.who}: {answer.message}"
                )
            if not isinstance(answer, Progress):
                return answer
            progress(f"rank {follower.rank}: {answer.line}")

    def _on_end(self, rank: int) -> None:
        if self._stopping:
            return
        log.error("rank %d has ended", rank)
        if self._memory is not None:
            self._memory.lose(rank)
