"""BackOff: when a process that has ended is started again, and when it is given up. The engine process, the OpenAI endpoint and
tritonserver each have one.
"""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
QUIET_S = 60.0  # seconds of service after which earlier ends are forgotten
WINDOW_S = 600.0


class BackOff:
    """The delay is FIRST_DELAY_S after the first end, and doubles with each further one up to MAX_DELAY_S."""

    def __init__(self, max_restarts: int | None) -> None:
        """Give up at the end that follows `max_restarts` restarts within WINDOW_S; None: never.

        A process that served for more than QUIET_S before it ended begins anew.
        """
        self._max_restarts = max_restarts
        self._ends: deque[float] = deque(maxlen=max_restarts or 1)
        self._delay_s = FIRST_DELAY_S

    def delay_after_end(self, now_s: float, served_s: float) -> float | None:
        """Count an end. Returns the seconds to wait before the next start, or None to give up.

        `served_s`: how long the process served before it ended; 0 for one that never did.
        """
        if served_s > QUIET_S:
            self._ends.clear()
            self._delay_s = FIRST_DELAY_S
        if len(self._ends) == self._max_restarts and now_s - self._ends[0] < WINDOW_S:
            return None
        self._ends.append(now_s)
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, MAX_DELAY_S)
        return delay_s

    def forgive(self, number: int) -> None:
        """Take back the latest ends, of which as many are counted, and the delays that they added."""
        for _ in range(min(number, len(self._ends))):
            self._ends.pop()
            self._delay_s = max(FIRST_DELAY_S, self._delay_s / 2)

    def since_first_s(self, now_s: float) -> float:
        """Seconds since the first end that counts. There has been one."""
        return now_s - self._ends[0]
