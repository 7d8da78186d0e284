"""Heart: says every HEARTBEAT_S that the engine process lives, and for how long the loop has been in its present turn.

It has a thread of its own and asks nothing of the loop's: it beats on while a step takes long, because native code runs without
the interpreter's lock. Time is counted in its own beats. A process that was stopped and goes on has not worked for all that time,
and must not look as if it had hung.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from backend.core.messages import HEARTBEAT_S, Heartbeat


class Heart:
    def __init__(self, present_turn: Callable[[], int | None], send: Callable[[Heartbeat], None]) -> None:
        """`present_turn`: the number of the loop's turn, None while it sleeps. `send` must not block."""
        self._present_turn = present_turn
        self._send = send
        self._turn: int | None = None  # at the last beat
        self._num_beats = 0  # in this turn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def beat(self) -> None:
        turn = self._present_turn()
        self._num_beats = self._num_beats + 1 if turn is not None and turn == self._turn else 0
        self._turn = turn
        self._send(Heartbeat(self._num_beats * HEARTBEAT_S))

    def _run(self) -> None:
        while not self._stopping.wait(HEARTBEAT_S):
            self.beat()
