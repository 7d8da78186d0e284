"""Exporter: a thread that sends the spans of ended requests to a collector. Adding a request never waits for it.

The queue is bounded; what does not fit is dropped and counted. A collector that refuses or does not answer is asked again with
growing pauses; meanwhile the queue fills.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

from backend.api.config.telemetry import OtlpSettings
from backend.serving.observe.ended import EndedRow
from backend.serving.observe.trace_context import TraceContext
from backend.serving.observe.tracing import otlp
from backend.serving.observe.tracing.measures import Measures

log = logging.getLogger("everbatch.serving")
MAX_WAITING = 2048  # requests; each has a few spans, at most a hundred
MAX_BATCH = 256  # requests of one export
DELAY_S = 1.0  # so long the thread collects before it sends
METRICS_S = 15.0  # between two exports of metrics
TIMEOUT_S = 5.0  # for each step of an export
MAX_ANSWER = 1 << 16  # bytes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
ATTEMPTS = 3
AGAIN = (429, 502, 503, 504)  # the answers for which OTLP says: try again
LAST_WORDS_S = 2.0

Traced = tuple[TraceContext, EndedRow]


class SpanTotals(NamedTuple):
    """Spans by what became of them, and requests whose spans were never made."""

    sent: int = 0
    rejected: int = 0  # by the collector, or not taken after the last attempt
    dropped_requests: int = 0  # the queue was full


class Exporter:
    """`add` is for one thread, here the housekeeper's; `totals` and `close` for any."""

    def __init__(
        self,
        settings: OtlpSettings,
        model: str,
        instance: str,
        delay_s: float = DELAY_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`model`: of Triton; `instance` names this process among those of the service."""
        self._settings, self._model, self._delay_s = settings, model, delay_s
        self._max_waiting = max_waiting
        self._resource = otlp.resource_of(settings.service_name, instance)
        self._waiting: deque[Traced] = deque()
        self._measures = Measures()
        self._measures_lock = threading.Lock()
        self._started_ns = time.time_ns()
        self._num_dropped = 0  # written by `add`
        self._num_sent = self._num_rejected = 0  # written by the thread
        self._stopped = threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="everbatch-traces", daemon=True)
        self._thread.start()

    @property
    def totals(self) -> SpanTotals:
        return SpanTotals(self._num_sent, self._num_rejected, self._num_dropped)

    def add(self, row: EndedRow) -> None:
        """Take a request that has ended; it is measured, and its spans are sent if it is traced."""
        with self._measures_lock:
            self._measures.add(row)
        if row.trace is None:
            return
        if len(self._waiting) >= self._max_waiting:
            self._num_dropped += 1
        else:
            self._waiting.append((row.trace, row))

    def close(self) -> None:
        """Send what waits, for two seconds at most."""
        self._stopped.set()
        self._thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        next_metrics = time.monotonic() + METRICS_S
        while not self._stopped.wait(self._delay_s):
            self._send_spans()
            if time.monotonic() >= next_metrics:
                next_metrics = time.monotonic() + METRICS_S
                self._send_metrics()
        self._send_spans()
        self._send_metrics()

    def _send_spans(self) -> None:
        while self._waiting:
            rows = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            try:
                body, num_spans = otlp.traces(rows, self._resource, self._model)
            except Exception:  # One request that cannot be encoded must not end the thread.
                log.exception("spans of %d requests could not be encoded", len(rows))
                continue
            answer = self._deliver("/v1/traces", body)
            num_rejected = num_spans if answer is None else min(num_spans, max(0, otlp.num_rejected(answer)))
            self._num_sent += num_spans - num_rejected
            self._num_rejected += num_rejected

    def _send_metrics(self) -> None:
        with self._measures_lock:
            points, now_ns = self._measures.points, time.time_ns()
            body = otlp.metrics(points, self._resource, self._model, self._started_ns, now_ns) if points else b""
        if body:
            self._deliver("/v1/metrics", body)

    def _deliver(self, path: str, body: bytes) -> bytes | None:
        """The collector's answer; None if it has not taken the body."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                status, answer = self._post(path, body)
            except (OSError, http.client.HTTPException) as error:
                status, answer, why = 0, b"", type(error).__name__
            else:
                why = f"status {status}"
            if 200 <= status < 300:
                self._tell("")
                return answer
            self._tell(why)
            if (status and status not in AGAIN) or attempt == ATTEMPTS or self._stopped.wait(pause_s):
                break
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """One request, without proxy and redirects. Raises OSError or HTTPException."""
        parts = urlsplit(self._settings.endpoint)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers = {**self._settings.headers, "content-type": "application/x-protobuf", "user-agent": "everbatch"}
        try:
            connection.request("POST", parts.path + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER)
        finally:
            connection.close()

    def _tell(self, trouble: str) -> None:
        """Log the beginning and the end of a time in which the collector takes nothing."""
        if trouble and not self._trouble:
            log.warning("the collector of traces does not take them (%s); requests go on without", trouble)
        elif self._trouble and not trouble:
            log.warning("the collector of traces takes them again")
        self._trouble = trouble
