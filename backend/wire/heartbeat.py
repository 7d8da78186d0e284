"""HeartbeatSender: sends a heartbeat every TICK_S, with the time that the loop has spent in its present iteration.

It has its own thread and needs nothing of the loop: it beats during a long step too, because native code releases the
interpreter's lock. Time is counted in beats, so that a process that was suspended and resumed does not look as if it had hung.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from backend.api.processes.liveness import TICK_S
from backend.core.messages import Heartbeat


class HeartbeatSender:
    def __init__(
        self,
        present_iteration: Callable[[], int | None],
        send: Callable[[Heartbeat], None],
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """`present_iteration`: the number of the loop's iteration, None while it sleeps. `send` must not block. No heartbeat is
        sent while `is_alive` returns False.
        """
        self._is_alive = is_alive
        self._present_iteration = present_iteration
        self._send = send
        self._turn: int | None = None  # iteration at the last beat
        self._num_beats = 0  # beats in this iteration
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def beat(self) -> None:
        turn = self._present_iteration()
        self._num_beats = self._num_beats + 1 if turn is not None and turn == self._turn else 0
        self._turn = turn
        self._send(Heartbeat(self._num_beats * TICK_S))

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            if self._is_alive():
                self.beat()
