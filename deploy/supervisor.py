"""`everbatch serve`: keep one TritonServer alive until told to stop.

Triton notices neither a stub that dies or stops nor an engine that is gone. So the supervisor asks the server about its
processes, and starts the whole of it again, with back-off: for ever if it was ready in between, and until failure
MAX_FAILURES in a row if it was not. An engine that was given up ends everything. A restart must be ready within a minute,
or three times what the first start took; one that hangs is started over.
First Ctrl-C or SIGTERM: drain and stop. Second: now. A server that never came up is not started again, unless it died of
something that does not come twice.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol, Self

from backend.api.processes.back_off import BackOff
from deploy.errors import EndReason, ServerFailed, StartCancelled

MAX_FAILURES = 5  # in a row, without being ready in between
MAX_FIRST_STARTS = 3
MIN_RESTART_S = 60.0
RESTART_FACTOR = 3.0  # A restart may take so many times as long as the first start took.
POLL_S = 0.25


class SupervisedServer(Protocol):
    """The methods of a TritonServer that the supervisor calls."""

    def start(self) -> None: ...
    def wait_ready(
        self, timeout_s: float, *, on_phase: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None: ...
    def stop(self, *, cancelled: Callable[[], bool]) -> None: ...
    def abandon(self) -> None: ...
    def kill(self) -> None: ...
    def failure(self) -> EndReason | None: ...


class Reporter(Protocol):
    """Reports to the user."""

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


class _Supervision:
    """One run of supervise()."""

    def __init__(
        self, server: SupervisedServer, reporter: Reporter, signals: StopSignals, ready_timeout_s: float
    ) -> None:
        self.server, self.reporter, self.signals = server, reporter, signals
        self.timeout_s = self.first_timeout_s = ready_timeout_s
        self.starts = 0
        self.was_ready = False
        self.ready_at: float | None = None  # when the present start became ready
        self.failures = 0  # in a row, without being ready in between
        self.back_off = BackOff(None)

    def live(self) -> EndReason | None:
        """One life of the server: start it, and wait until a signal (None) or a failure. Raises StartCancelled, and
        ServerFailed if the first start does not succeed.
        """
        try:
            self._start()
        except OSError as error:  # No room on the disk, too many processes, and the like.
            if not self.was_ready:
                raise ServerFailed(f"the server cannot be started: {error}") from None
            return EndReason(f"the server cannot be started: {error}")
        except ServerFailed as error:
            if not self.was_ready and not (error.by_chance and self.starts < MAX_FIRST_STARTS):
                raise
            return EndReason(str(error))
        while not self.signals.stop_asked():
            if failure := self.server.failure():
                return failure
            self.signals.wait(POLL_S)
        return None

    def _start(self) -> None:
        self.reporter.phase("starting tritonserver")
        self.starts += 1
        self.ready_at = None
        began = time.monotonic()
        self.server.start()
        self.server.wait_ready(self.timeout_s, on_phase=self.reporter.phase, cancelled=self.signals.stop_asked)
        if not self.was_ready:
            took_s = time.monotonic() - began
            self.timeout_s = min(self.first_timeout_s, max(MIN_RESTART_S, RESTART_FACTOR * took_s))
        self.was_ready = True
        self.ready_at, self.failures = time.monotonic(), 0
        self.reporter.ready()

    def go_on_after(self, failure: EndReason) -> bool:
        """Report the failure and wait; returns whether to start again."""
        if failure.final:
            self.reporter.problem(f"{failure.text}; stopping the server")
            return False
        self.failures += 1
        now = time.monotonic()
        delay = self.back_off.delay_after_end(now, 0.0 if self.ready_at is None else now - self.ready_at)
        if self.failures == MAX_FAILURES or delay is None:
            self.reporter.problem(f"{failure.text}; failure {MAX_FAILURES} since it was ready, giving up")
            return False
        self.reporter.problem(f"{failure.text}; starting the server again in {delay:g} s")
        self.signals.wait(delay)
        return True


def supervise(server: SupervisedServer, reporter: Reporter, signals: StopSignals, ready_timeout_s: float) -> int:
    """Run until a signal (returns 0), or until starting again is of no use (returns 1). Nothing is left running
    afterwards.

    Raises UserError or ServerFailed when the very first start does not succeed.
    """
    supervision = _Supervision(server, reporter, signals, ready_timeout_s)
    try:
        while True:
            failure = supervision.live()
            if failure is None:
                reporter.stopping()
                server.stop(cancelled=signals.now_asked)
                return 0
            server.abandon()
            if not supervision.go_on_after(failure):
                return 1
            if signals.stop_asked():
                return 0
    except StartCancelled:
        return 0
    finally:
        server.kill()
