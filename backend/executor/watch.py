"""Watch: notices that the engine gives no sign of life. The owner of the engine process kills it then.

    silent for a moment             the engine is taken to be well
    for too long (api/processes/liveness.py)   the Executor is not ready: new requests are refused, and those in flight wait
    for longer than its patience    the owner kills the process, whose requests end with an error; it is started again

Silence is counted in ticks of the watch's own thread, not in seconds. A stub that was itself stopped or starved has missed its
own ticks too, and then finds the heartbeats that wait in its socket. So it does not take the engine for dead. An engine process
that works, or waits for a processor, is slow and has more time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from backend.api.processes.liveness import TICK_S, Liveness

log = logging.getLogger("everbatch.executor")


class Watched(Protocol):
    """The part of backend.executor.engine_supervisor.EngineProcess that is used here."""

    @property
    def num_signs(self) -> int:
        """A number that grows with each start and each status line, the signs of life before the first heartbeat."""
        ...

    @property
    def patience_s(self) -> float | None:
        """How many seconds it may be silent; None while no process runs."""
        ...

    @property
    def longest_turn_s(self) -> float:
        """How many seconds it may be in one turn of its loop, which is one step of the model."""
        ...

    def kill(self, reason: str, stuck_s: float) -> None:
        """End the process, which has been stuck for `stuck_s` seconds. `reason` says in words what it did."""
        ...


class OwnedEngine(Watched, Protocol):
    """The part of EngineProcess that an Executor uses which owns its engine."""

    @property
    def num_deaths(self) -> int:
        """How often it has ended without being stopped."""
        ...

    @property
    def has_given_up(self) -> bool:
        """True once it is not started again."""
        ...

    @property
    def why_given_up(self) -> str:
        """One sentence; empty before."""
        ...

    def stop(self) -> None:
        """End the engine, which is not started again."""
        ...


class Watch:
    def __init__(self, process: Watched | None = None, on_tick: Callable[[], None] = lambda: None) -> None:
        """`process` is the engine process that this watch may kill; None for an engine that another process owns. `on_tick` is
        called behind each tick, on the watch's thread.
        """
        self._process = process
        self._on_tick = on_tick
        self._silence = Liveness()
        self._turn_age_s = 0.0
        self._num_signs = 0
        self.pid: int | None = None  # the engine process's id, once it is known
        self._has_killed = False
        self.is_connected = False  # Silence without a connection is not worth a warning.
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    @property
    def silent_s(self) -> float:
        """The seconds since the last sign of life, counted in ticks."""
        return self._silence.silent_s

    @property
    def is_fresh(self) -> bool:
        return not self._silence.is_too_long

    def describe(self) -> str:
        """A sentence about how long the engine has been silent, for errors and the log."""
        return (
            f"the engine has given no sign of life for {self.silent_s:.1f} s, the limit is {self._silence.limit_s:g} s"
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def beat(self, turn_age_s: float) -> None:
        """Take in a heartbeat. The engine has been in its present turn for `turn_age_s` seconds."""
        if not self.is_fresh and self.is_connected:
            log.warning("the engine gives signs of life again, after %.1f s", self.silent_s)
        self._silence.end()
        self._turn_age_s = turn_age_s

    def tick(self) -> None:
        """Count one tick of silence, and kill the owned process if it has been silent or in one step for too long."""
        was_fresh = self.is_fresh
        self._silence.tick(self.pid)
        if was_fresh and not self.is_fresh and self.is_connected:
            log.warning("%s", self.describe())
        if self._process is not None:
            self._judge(self._process)

    def _judge(self, process: Watched) -> None:
        num_signs, patience_s = process.num_signs, process.patience_s
        if num_signs != self._num_signs:
            self._num_signs, self._has_killed = num_signs, False
            self._silence.end()
            self._turn_age_s = 0.0
        if patience_s is None or self._has_killed:
            return
        if self.silent_s > patience_s:
            reason, stuck_s, limit_s = "gave no sign of life", self.silent_s, patience_s
        elif self._turn_age_s > process.longest_turn_s:
            reason, stuck_s, limit_s = "was in one step", self._turn_age_s, process.longest_turn_s
        else:
            return
        self._has_killed = True
        process.kill(f"{reason} for {stuck_s:.1f} s, the limit is {limit_s:g} s", stuck_s)

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            self.tick()
            self._on_tick()
