"""Watch: whether the engine gives signs of life; the owner of the engine process ends one that does not.

    0 s ... STALE_S        nothing is known to be wrong
    STALE_S ... patience   not ready: new requests are refused, those in flight wait
    beyond                 the owner kills the process; its death answers them, and it is started again

Silence is counted in ticks of the watch's own thread, not in seconds. A stub that was itself stopped, or starved, comes back to
the heartbeats that wait in its socket and has missed one tick.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from backend.core.messages import HEARTBEAT_S

log = logging.getLogger("everbatch.executor")
TICK_S = HEARTBEAT_S
STALE_S = 1.25


class Watched(Protocol):
    """backend.executor.engine_supervisor.EngineProcess, as far as it is watched."""

    @property
    def num_signs(self) -> int:
        """Grows with each start and each status line: signs of life before there are heartbeats."""
        ...

    @property
    def patience_s(self) -> float | None:
        """How long it may be silent. None while there is no process."""
        ...

    @property
    def longest_turn_s(self) -> float:
        """How long it may be in one turn of its loop, which is one step of the model."""
        ...

    def kill(self, reason: str, stuck_s: float) -> None: ...


class Watch:
    def __init__(self, process: Watched | None = None):
        """`process`: the one that this watch may kill; None for an engine of somebody else's."""
        self._process = process
        self._silent_s = 0.0
        self._turn_age_s = 0.0
        self._num_signs = 0
        self._has_killed = False
        self.is_connected = False  # while there is no connection, silence is nothing to warn of
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    @property
    def silent_s(self) -> float:
        """For how long there has been no sign of life."""
        return self._silent_s

    @property
    def is_fresh(self) -> bool:
        return self._silent_s < STALE_S

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def beat(self, turn_age_s: float) -> None:
        """The engine lives, and has been in its present turn for so long."""
        if not self.is_fresh and self.is_connected:
            log.warning("the engine gives signs of life again, after %.1f s", self._silent_s)
        self._silent_s = 0.0
        self._turn_age_s = turn_age_s

    def tick(self) -> None:
        was_fresh = self.is_fresh
        self._silent_s += TICK_S
        if was_fresh and not self.is_fresh and self.is_connected:
            log.warning("no sign of life of the engine for %.1f s", self._silent_s)
        if self._process is not None:
            self._judge(self._process)

    def _judge(self, process: Watched) -> None:
        num_signs, patience_s = process.num_signs, process.patience_s
        if num_signs != self._num_signs:
            self._num_signs, self._has_killed = num_signs, False
            self._silent_s = self._turn_age_s = 0.0
        if patience_s is None or self._has_killed:
            return
        if self._silent_s > patience_s:
            reason, stuck_s, limit_s = "gave no sign of life", self._silent_s, patience_s
        elif self._turn_age_s > process.longest_turn_s:
            reason, stuck_s, limit_s = "was in one step", self._turn_age_s, process.longest_turn_s
        else:
            return
        self._has_killed = True
        process.kill(f"{reason} for {stuck_s:.1f} s, the limit is {limit_s:g} s", stuck_s)

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            self.tick()
