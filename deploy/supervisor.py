"""`everbatch serve`: keep one TritonServer alive until told to stop.

A stub that dies is invisible to Triton: its streams hang and every endpoint still says 200. So the supervisor watches
the processes and starts the whole server again, with back-off; after MAX_FAILURES within WINDOW_S it gives up.
First Ctrl-C or SIGTERM: drain and stop. Second: now. A server that never came up is not started again.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Protocol, Self

from deploy.errors import ServerFailed
from deploy.processes import Process
from deploy.server import StartCancelled

MAX_FAILURES = 5
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
POLL_S = 0.25


class Server(Protocol):
    """What the supervisor needs of a TritonServer."""

    @property
    def exit_status(self) -> int | None: ...
    def start(self) -> None: ...
    def wait_ready(
        self, timeout_s: float, *, on_phase: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None: ...
    def stop(self, *, cancelled: Callable[[], bool]) -> None: ...
    def kill(self) -> None: ...
    def running(self) -> bool: ...
    def dead_stubs(self) -> list[Process]: ...


class Reporter(Protocol):
    """Who tells the user."""

    def phase(self, text: str) -> None: ...
    def ready(self) -> None: ...
    def problem(self, text: str) -> None: ...
    def stopping(self) -> None: ...


class StopSignals:
    """Counts SIGINT and SIGTERM while it is entered; handlers only write to a pipe, so that a wait ends at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> Self:
        self.count = 0
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        os.write(self._write, b"x")

    def stop_asked(self) -> bool:
        return self.count >= 1

    def now_asked(self) -> bool:
        return self.count >= 2

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a signal that has not been waited for."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            os.read(self._read, 64)


class FailureWindow:
    """Failures of the last WINDOW_S seconds, and how long to wait after the latest."""

    def __init__(self, limit: int = MAX_FAILURES, window_s: float = WINDOW_S):
        self.limit, self.window_s = limit, window_s
        self._times: deque[float] = deque()

    def add(self, now: float) -> float | None:
        """Count a failure at `now` (seconds). Returns the delay before the next start, or None to give up."""
        self._times.append(now)
        while now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(self._times) - 1))


def supervise(server: Server, reporter: Reporter, signals: StopSignals, ready_timeout_s: float) -> int:
    """Run until a signal (returns 0) or too many failures (returns 1). Nothing is left running afterwards.

    Raises UserError or ServerFailed when the very first start does not succeed.
    """
    failures = FailureWindow()
    was_ready = False
    try:
        while True:
            try:
                _start(server, reporter, signals, ready_timeout_s)
                was_ready = True
                problem = _watch(server, signals)
            except StartCancelled:
                return 0
            except ServerFailed as failure:
                if not was_ready:
                    raise
                problem = str(failure)
            if problem is None:
                reporter.stopping()
                server.stop(cancelled=signals.now_asked)
                return 0
            server.kill()
            delay = failures.add(time.monotonic())
            if delay is None:
                reporter.problem(f"{problem}; failure {MAX_FAILURES} within {WINDOW_S / 60:.0f} minutes, giving up")
                return 1
            reporter.problem(f"{problem}; starting the server again in {delay:g} s")
            signals.wait(delay)
            if signals.stop_asked():
                return 0
    finally:
        server.kill()


def _start(server: Server, reporter: Reporter, signals: StopSignals, ready_timeout_s: float) -> None:
    reporter.phase("starting tritonserver")
    server.start()
    server.wait_ready(ready_timeout_s, on_phase=reporter.phase, cancelled=signals.stop_asked)
    reporter.ready()


def _watch(server: Server, signals: StopSignals) -> str | None:
    """Block until a signal (returns None) or a failure (returns what happened)."""
    while not signals.stop_asked():
        if not server.running():
            return f"tritonserver ended with status {server.exit_status}"
        if dead := server.dead_stubs():
            return f"stub process {dead[0].pid} died"
        signals.wait(POLL_S)
    return None
