"""How running requests are stopped: EngineRows asks the engine, CancellationPoller finds out that a client has left.

The poller asks Triton which live streams their clients have cancelled. Triton does not say so unasked.

One thread sweeps over all live streams, queued ones included, once in every period. Each `is_cancelled` is a round trip of
60 to 100 us to the server, and holds up the responses of others. So with many streams the sweeps become rarer: they take at most
SHARE of the time, until they are MAX_PAUSE_S apart. More threads would not make a sweep shorter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from backend.serving.protocols import EngineClient
from backend.serving.stream import OutputRow, Stream

log = logging.getLogger("everbatch.serving")
SHARE = 0.02
MAX_PAUSE_S = 0.5


class EngineRows:
    """The rows of streams as the engine has them. Any thread may call it."""

    def __init__(self, executor: EngineClient) -> None:
        self._executor = executor

    def stop(self, stream: Stream) -> None:
        """Ask the engine to cancel all rows of a stream that still run."""
        for row in stream.rows:
            if not row.ended and row.request_id is not None:
                self._executor.cancel_request(row.request_id)

    def stop_at(self, row: OutputRow, sequence_index: int, num_output_tokens: int) -> None:
        """Ask the engine to cancel one sequence of a row, whose text ended after that many output tokens."""
        assert row.request_id is not None, "a row that answered has an id"
        self._executor.cancel_request(row.request_id, num_output_tokens, sequence_index)


class CancellationPoller:
    def __init__(
        self,
        live_streams: Callable[[], list[Stream]],
        abandon: Callable[[Stream], None],
        period_s: float,
        log_name: str = "",
    ) -> None:
        """The poller's thread calls `abandon(stream)` once for each stream whose client is gone, and logs it under `log_name`."""
        self._live_streams = live_streams
        self._abandon = abandon
        self._period_s = period_s
        self._log_name = log_name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everbatch-cancellation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)

    def sweep(self) -> None:
        """Ask about every live stream once."""
        for stream in self._live_streams():
            if not stream.closed and not stream.abandoned and self._is_cancelled(stream):
                if self._log_name:
                    log.info("[%s] Cancelling the request", self._log_name)
                self._abandon(stream)

    def _is_cancelled(self, stream: Stream) -> bool:
        try:
            with stream.gate:
                return not stream.closed and stream.sender.is_cancelled()
        except Exception as error:
            # Which types Triton raises here is not documented. The next sweep asks again, so nothing is lost.
            log.warning("asking for the cancellation of request %r failed: %s", stream.client_request_id, error)
            return False

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                self.sweep()
            except Exception:
                # The thread must survive a failed sweep, because otherwise no cancellation would be noticed any more.
                log.exception("a cancellation sweep failed")
            self._stopped.wait(pause_s(time.monotonic() - started, self._period_s))


def pause_s(sweep_s: float, period_s: float) -> float:
    """How long to wait after a sweep that took `sweep_s`."""
    return max(period_s - sweep_s, min(sweep_s / SHARE - sweep_s, MAX_PAUSE_S), period_s / 2)
