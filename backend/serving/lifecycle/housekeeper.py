"""Housekeeper: one thread that does the stub's periodic work, and that watches the drain signal and the server process.

SIGUSR1 asks for a drain: nothing new is accepted, and running requests may go on for a grace period before they are ended.
The signal is needed because Triton tells a model of a shutdown only after its last request has been answered. A Python
signal handler would run only when the main thread next executes Python, which may never happen. Therefore this thread reads
the pipe to which the interpreter writes the number of each signal at once.

When the server process has ended, the stub may hang for ever on a lock in shared memory. Therefore this thread watches the
parent's process id and ends the stub when it changes.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from backend.api.processes.liveness import TICK_S

log = logging.getLogger("everbatch.serving")


class Housekeeper:
    def __init__(
        self,
        tick: Callable[[], None],
        period_s: float,
        drain: Callable[[], None],
        orphaned: Callable[[], None],
        parent_pid: Callable[[], int] = os.getppid,
        pulse: Callable[[], None] = lambda: None,
        pulse_s: float = TICK_S,
    ) -> None:
        """Nothing runs before `start`; then the housekeeper's own thread calls the callbacks.

        It calls `pulse` every `pulse_s` seconds, `tick` every `period_s` seconds, `drain` at the first SIGUSR1, and
        `orphaned` when `parent_pid` returns another process than it did here.
        """
        self._tick = tick
        self._period_s = period_s
        self._drain = drain
        self._orphaned = orphaned
        self._parent_pid = parent_pid
        self._parent = parent_pid()
        self._pulse = pulse
        self._pulse_s = pulse_s
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._listening = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everbatch-housekeeper", daemon=True)

    def listen_for_drain(self) -> None:
        """Let SIGUSR1 start the drain. Call it on the main thread only."""
        self._listening = True
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)  # the thread reads the pipe

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and ignore the signal from now on. Call it on the main thread only."""
        self._stopped.set()
        os.write(self._writer, b"\0")
        self._thread.join(timeout=5)
        if self._listening:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        next_tick = next_pulse = 0.0
        drained = False
        while not self._stopped.is_set():
            wait_s = max(0.0, min(next_tick, next_pulse) - time.monotonic())
            woken, _, _ = select.select([self._reader], [], [], wait_s)
            signals = os.read(self._reader, 64) if woken else b""
            if self._parent_pid() != self._parent:
                self._orphaned()
                return
            if signal.SIGUSR1 in signals and not drained:
                drained = True
                self._guarded(self._drain)
            if time.monotonic() >= next_pulse:
                next_pulse = time.monotonic() + self._pulse_s
                self._guarded(self._pulse)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._period_s
                self._guarded(self._tick)

    @staticmethod
    def _guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # A call that fails must not end this thread, which also watches the server process.
            log.exception("housekeeping failed")


def end_orphan(shutdown: Callable[[], None]) -> None:
    """End the engine and this process within two seconds, because the server process is gone."""
    print("everbatch: the server process is gone, ending", file=sys.stderr, flush=True)
    worker = threading.Thread(target=shutdown, daemon=True)
    worker.start()
    worker.join(timeout=2)
    os._exit(1)
