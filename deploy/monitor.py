"""Watches a server that has become ready: signs of life of its stubs, answers of tritonserver, the length of its log.

A thread looks four times a second. As soon as somebody is not well it lets Triton say "not ready" (deploy/readiness.py), and
"ready" again when everybody is. failure() says when the server should end: an engine that was given up, a stub or a
tritonserver that has been silent for as long as the watchdog allows. An end of the engine process, which its owner starts
again, is only reported. Only stop() ends the thread: an error in one look is reported, and the next look tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backend.api.processes.liveness import TICK_S
from deploy import health, log_files, probe
from deploy.engine_events import EngineEvents
from deploy.errors import EndReason
from deploy.processes import Process
from deploy.readiness import EXPLANATION, Readiness
from deploy.signs import Signs

LIVE_EVERY_S = 1.0
LIVE_TIMEOUT_S = 1.0
PAUSE_S = 2.0  # After a wait that took so much longer than asked, this process or the whole machine had been stopped.


class Monitor:
    """One life of a server. start() once it is ready, stop() before it is ended."""

    def __init__(
        self,
        url: str,
        signs: Signs,
        log_path: Path,
        readiness: Readiness,
        dead_stubs: Callable[[], list[Process]],
        watchdog_s: float,
        on_event: Callable[[str], None],
        judge: Callable[[Sequence[health.Report]], health.Verdict] = health.judge,
        look_after_models: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_event` is called with a sentence for the user, in the monitor's thread. `judge`: what follows from the signs.
        `look_after_models`: called every LIVE_EVERY_S seconds.
        """
        self._verdict_of, self._look_after_models = judge, look_after_models
        self._url, self._signs, self._log_path = url, signs, log_path
        self._readiness, self._dead_stubs, self._watchdog_s = readiness, dead_stubs, watchdog_s
        self._tell_user, self._engine_events = on_event, EngineEvents(log_path)
        self._verdict = health.Verdict()
        self._answered_at = time.monotonic()
        self._next_live = 0.0
        self._refused = False
        self._troubles: dict[str, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everbatch-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Returns when the thread has ended, within a few seconds even if the server is silent."""
        self._end.set()
        self._thread.join()

    def failure(self) -> EndReason | None:
        """Why the server must end now, if it must. Any thread; does not block."""
        if not self._thread.is_alive() and not self._end.is_set():
            return EndReason("the launcher's own thread that watches the server has ended")
        verdict, silent_s = self._verdict, time.monotonic() - self._answered_at
        if verdict.given_up is not None:
            return EndReason(
                f"the engine of model {verdict.given_up} ended too often and was given up; the log is {self._log_path}",
                final=True,
            )
        allowed = f"allowed are {self._watchdog_s:g} s (triton.watchdog_timeout_s)"
        if silent_s > self._watchdog_s:  # told before a silent stub, which may wait for this server
            return EndReason(f"tritonserver has not answered for {silent_s:.1f} s, {allowed}")
        if verdict.silent is not None and verdict.silent.silent_s > self._watchdog_s:
            return EndReason(f"{verdict.unready}, {allowed}")
        return None

    def _run(self) -> None:
        while not self._wait():
            for part in (self._judge, self._follow_engine, self._look_after_server):
                try:
                    part()
                except Exception as error:  # Whatever it is, the other parts and the next look are worth more.
                    self._tell_once(part.__name__, f"watching the server failed: {type(error).__name__}: {error}")
                else:
                    self._troubles.pop(part.__name__, None)

    def _judge(self) -> None:
        self._verdict = self._verdict_of(self._signs.look())
        self._tell(self._verdict.unready is None and not self._dead_stubs())

    def _follow_engine(self) -> None:
        for event in self._engine_events.fresh():
            self._on_event(f"{event}; the log is {self._log_path}")

    def _look_after_server(self) -> None:
        now = time.monotonic()
        if now >= self._next_live:
            self._next_live = now + LIVE_EVERY_S
            self._ask_whether_live()
            self._look_after_models()
            self._tell_once("log", log_files.look_after(self._log_path))

    def _on_event(self, text: str) -> None:
        try:
            self._tell_user(text)
        except Exception as error:  # A console that is gone must not end the watch over the server.
            log_files.append(self._log_path, f"{text} (not shown to the user: {type(error).__name__})")

    def _tell_once(self, kind: str, trouble: str | None) -> None:
        """Report a trouble unless the look before had reported it; None: there is none."""
        if trouble is None:
            self._troubles.pop(kind, None)
        elif kind not in self._troubles:
            self._troubles[kind] = trouble
            self._on_event(trouble)

    def _wait(self) -> bool:
        """Until the next look; returns whether it is the end. A stop of this process itself is no silence of the server."""
        began = time.monotonic()
        end = self._end.wait(TICK_S)
        now = time.monotonic()
        if now - began > TICK_S + PAUSE_S:
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
