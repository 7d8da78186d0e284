"""When a request is sent again: after UNAVAILABLE, and once something of its answer has come only where that is asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from client.errors import ClientError


@dataclass(frozen=True)
class Retry:
    """Exponential back-off. The n-th pause is a random time between half of `first_pause_s * 2**n` and all of it, so that
    clients that were refused together do not come back together.

    `resume_s`: a stream whose server ends in its midst waits so many seconds for the next one, and goes on with the bytes that
    it would have had; 0: it ends with Unavailable. Turns that add to a session are never sent again.
    """

    attempts: int = 5  # in all; 1: nothing is sent again
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0
    resume_s: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not (self.first_pause_s >= 0 and self.longest_pause_s >= 0 and self.resume_s >= 0):
            raise ValueError(f"retry is {self}, at least 1 attempt and no negative pauses are expected")

    def pause_s(self, attempt: int, error: ClientError) -> float | None:
        """Seconds to wait before the next attempt; None when there is none. `attempt`: that failed, the first is 0."""
        if error.code != "UNAVAILABLE" or attempt + 1 >= self.attempts:
            return None
        return random.uniform(0.5, 1.0) * float(min(self.longest_pause_s, self.first_pause_s * 2**attempt))


NEVER = Retry(attempts=1)
