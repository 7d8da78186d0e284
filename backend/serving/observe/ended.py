"""Facts about ended requests, for the metrics and for the request log.

Each row of a Triton request that was handed to the engine ends once, with the engine's final response. The thread that
receives the response notes it here, which takes microseconds; the housekeeper does everything else later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from backend.api import ErrorCode, PerfMetrics, Response
from backend.serving.observe.trace_context import TraceContext
from backend.serving.stream import Failure, OutputRow, Stream

log = logging.getLogger("everbatch.serving")
MAX_WAITING = 100_000  # ended requests that may wait for the housekeeper; beyond it the oldest are forgotten


class EndedRow(NamedTuple):
    """A row that has ended, or a request that was refused before it had any."""

    request_id: str  # the client's own
    namespace: str
    row: int | None  # its number, in a request of several
    reason: str  # end_id, stop_words, length, timed_out, cancelled, error or refused
    code: str  # code of the error, or ""
    num_prompt_tokens: int
    num_output_tokens: int  # sent to the client
    received_ns: int  # time of CLOCK_MONOTONIC, as in `account`
    ended_ns: int
    wall_time: float  # seconds since 1970, when it ended
    account: PerfMetrics | None  # the engine's; None when the engine has not accepted it, or has died
    num_sequences: int = 1
    trace: TraceContext | None = None

    @property
    def total_s(self) -> float:
        """From the arrival of the Triton request to its end."""
        return (self.ended_ns - self.received_ns) / 1e9

    @property
    def queue_s(self) -> float | None:
        """Waiting for the first admission to the batch, once it was prepared; None when that never came."""
        if self.account is None or not self.account.first_scheduled_ns:
            return None
        return max(0, self.account.first_scheduled_ns - self.account.queued_ns) / 1e9

    @property
    def prepare_s(self) -> float | None:
        """Waiting for its guide to be compiled or its adapter to be read; None when it did not."""
        if self.account is None or not self.account.prepared_ns:
            return None
        return (self.account.prepared_ns - self.account.arrival_ns) / 1e9

    @property
    def first_token_s(self) -> float | None:
        """From the arrival of the Triton request to its first token."""
        if self.account is None or not self.account.first_token_ns:
            return None
        return (self.account.first_token_ns - self.received_ns) / 1e9

    @property
    def inter_token_s(self) -> float | None:
        """The mean time between two tokens; None with less than two."""
        if self.account is None or self.account.num_output_tokens < 2:
            return None
        between_ns = self.account.last_token_ns - self.account.first_token_ns
        return between_ns / 1e9 / (self.account.num_output_tokens - 1)


class EndedRows:
    """Ended rows that wait for the housekeeper. Any thread adds rows, one thread takes them."""

    def __init__(self) -> None:
        self._waiting: deque[EndedRow] = deque()
        self._num_lost = 0

    def add(self, stream: Stream, row: OutputRow, response: Response) -> None:
        """A row of the engine's has had its final response."""
        if not row.is_request:
            return
        code = str(response.error_code) if response.has_error() else ""
        if stream.failure is not None:
            code = str(stream.failure.code)
        self._put(stream, row, _reason(row, response), code, response.account)

    def add_refused(self, stream: Stream, failure: Failure) -> None:
        """A request was answered with an error before it had any rows."""
        reason = "cancelled" if failure.code is ErrorCode.CANCELLED else "refused"
        self._put(stream, None, reason, str(failure.code), None)

    def take(self, budget_s: float) -> Iterator[EndedRow]:
        """Take waiting rows, oldest first, until `budget_s` seconds have passed."""
        if self._num_lost:
            log.warning("%d ended requests are missing from metrics and request log", self._num_lost)
            self._num_lost = 0
        deadline = time.monotonic() + budget_s
        while self._waiting and time.monotonic() < deadline:
            yield self._waiting.popleft()

    def _put(self, stream: Stream, row: OutputRow | None, reason: str, code: str, account: PerfMetrics | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._num_lost += 1
        self._waiting.append(
            EndedRow(
                request_id=stream.client_request_id,
                namespace=stream.namespace,
                row=stream.rows.index(row) if row is not None and len(stream.rows) > 1 else None,
                reason=reason,
                code=code,
                num_prompt_tokens=0 if row is None else row.num_input_tokens,
                num_output_tokens=0 if row is None else row.output.num_output_tokens,
                received_ns=stream.received_ns,
                ended_ns=time.monotonic_ns(),
                wall_time=time.time(),
                account=account,
                num_sequences=1 if row is None else row.num_sequences,
                trace=stream.trace,
            )
        )


def _reason(row: OutputRow, response: Response) -> str:
    """The reason that the client received: a text may end by a stop string while the engine ends the row by its length."""
    if response.has_error():
        return "error"
    return (row.output.finish or response.result.finish_reasons[0]).name.lower()
