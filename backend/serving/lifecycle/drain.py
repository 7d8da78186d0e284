"""Drain: new requests are refused, running ones may go on for a grace period, and what still runs then is ended."""

from __future__ import annotations

import logging
import time

from backend.serving.protocols import EngineClient

log = logging.getLogger("everbatch.serving")
OTHERS_MARGIN_S = 1.0  # The other models need this much more time to end their own streams when the grace is over.
SHUTTING_DOWN = "the server is shutting down; send the request to another one, or again when it is back"


class Drain:
    """The housekeeper begins it; any thread may ask about it."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ends: float | None = None  # by the monotonic clock; None: it has not begun

    @property
    def is_on(self) -> bool:
        return self._ends is not None

    @property
    def is_over(self) -> bool:
        """True if the grace has passed."""
        return self._ends is not None and time.monotonic() >= self._ends

    def begin(self, num_live: int) -> None:
        log.warning("draining: %d requests may run for %.0f s more", num_live, self._grace_s)
        self._ends = time.monotonic() + self._grace_s

    def wait_for_other_models(self, executor: EngineClient) -> None:
        """Wait until no request runs in the engine, at most until the end of the grace.

        Triton ends each model as soon as its own requests are over, while requests of the text models may still need the engine.
        """
        deadline = (self._ends or time.monotonic() + self._grace_s) + OTHERS_MARGIN_S
        while time.monotonic() < deadline and executor.is_ready():
            stats = executor.latest_stats()
            if stats is None or stats.latest.num_active_requests == 0:
                return
            time.sleep(0.05)  # Polled, because the arrival of statistics wakes no thread.
