"""Watches a server that has become ready: signs of life of its stubs, answers of tritonserver, the length of its log.

A thread looks four times a second. As soon as somebody is not well it lets Triton say "not ready" (deploy/readiness.py), and
"ready" again when everybody is. failure() says when the server should end: an engine that was given up, a stub or a
tritonserver that has been silent for as long as the watchdog allows. Ends of the engine process, which its owner starts
again by itself, are only told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from deploy import health, log_files, probe
from deploy.engine_events import EngineEvents
from deploy.errors import Failure
from deploy.processes import Process
from deploy.readiness import EXPLANATION, Readiness

POLL_S = 0.25
LIVE_EVERY_S = 1.0
LIVE_TIMEOUT_S = 1.0
PAUSE_S = 2.0  # After a wait that took so much longer than asked, this process or the whole machine had been stopped.


class Monitor:
    """One life of a server. start() once it is ready, stop() before it is ended."""

    def __init__(
        self,
        url: str,
        directory: Path,
        log_path: Path,
        readiness: Readiness,
        dead_stubs: Callable[[], list[Process]],
        watchdog_s: float,
        on_event: Callable[[str], None],
    ) -> None:
        """`directory`: where the stubs leave their signs of life. `on_event` is called with a sentence for the user, in the
        monitor's thread.
        """
        self._url, self._directory, self._log_path = url, directory, log_path
        self._readiness, self._dead_stubs, self._watchdog_s = readiness, dead_stubs, watchdog_s
        self._on_event, self._engine_events = on_event, EngineEvents(log_path)
        self._verdict = health.Verdict()
        self._answered_at = time.monotonic()
        self._trust_after = self._next_live = 0.0
        self._refused = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everbatch-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Returns when the thread has ended, within a few seconds even if the server is silent."""
        self._end.set()
        self._thread.join()

    def failure(self) -> Failure | None:
        """Why the server must end now, if it must. Any thread; does not block."""
        verdict, silent_s = self._verdict, time.monotonic() - self._answered_at
        if verdict.given_up is not None:
            return Failure(
                f"the engine of model {verdict.given_up} ended too often and was given up; the log is {self._log_path}",
                final=True,
            )
        allowed = f"allowed are {self._watchdog_s:g} s (triton.watchdog_timeout_s)"
        if silent_s > self._watchdog_s:  # told before a silent stub, which may wait for this server
            return Failure(f"tritonserver has not answered for {silent_s:.1f} s, {allowed}")
        if verdict.silent is not None and verdict.silent.age_s > self._watchdog_s:
            return Failure(f"{verdict.unready}, {allowed}")
        return None

    def _run(self) -> None:
        while not self._wait():
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for event in self._engine_events.fresh():
            self._on_event(f"{event}; the log is {self._log_path}")
        if now >= self._trust_after:
            self._verdict = health.judge(health.read(self._directory, time.monotonic_ns()))
        self._tell(self._verdict.unready is None and not self._dead_stubs())
        if now >= self._next_live:
            self._next_live = now + LIVE_EVERY_S
            self._ask_whether_live()
            log_files.cut_if_long(self._log_path)

    def _wait(self) -> bool:
        """Until the next look; returns whether it is the end. After a stop of this process itself nobody is judged
        before everybody had the time to give a sign.
        """
        began = time.monotonic()
        end = self._end.wait(POLL_S)
        now = time.monotonic()
        if now - began > POLL_S + PAUSE_S:
            self._trust_after = now + PAUSE_S
            self._answered_at = now
        return end

    def _ask_whether_live(self) -> None:
        if probe.is_live(self._url, LIVE_TIMEOUT_S):
            self._answered_at = time.monotonic()

    def _tell(self, ready: bool) -> None:
        was = self._readiness.told_ready
        try:
            self._readiness.tell(ready)
        except probe.ProbeFailed as failure:  # The server is stopped or ending. The next look tries again.
            if not self._refused:
                self._on_event(f"the server was not told that it is {'ready' if ready else 'not ready'}: {failure}")
            self._refused = True
            return
        self._refused = False
        if was and not ready:
            log_files.append(self._log_path, EXPLANATION)
            self._on_event(f"not ready: {self._verdict.unready or 'a stub has ended'}")
        elif ready and not was:
            self._on_event("ready again")
