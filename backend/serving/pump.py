"""Responses from the engine to Triton, over a few coalescing sender threads.

    engine reader --deliver()--> stream.inbox --(stream queued at most once)--> lane --> sender --send()--> Triton

Rules
  - A stream (one Triton request of one or more rows) stays with one lane, hence its responses keep their order, and
    only that lane's thread touches its row outputs and its Triton sender.
  - What arrives while a send is in flight joins the next response, unless each token is to have its own (`coalesce` off).
  - FINAL goes out exactly once per stream, on its last data or error response; never a response that says nothing.
  - A row's error ends that row only, and is held back until all rows have ended: it is then the stream's one error, and
    its last response. Several failed rows share it: its code is that of the row that failed first, its text names each
    row. Nothing is ever sent after an error, because Triton 24.10 may not survive that (backend/README.md).
  - A stream-wide failure (`fail`) ends all rows with one error.
  - A request that is refused as it comes in is answered by the thread that refuses it, not behind streams (`refuse`).
  - A send that raises ends the stream: error with FINAL, else a bare FINAL, tried twice. Its rows are cancelled in the
    engine.
  - `deliver`, `fail` and `open` never block; they may be called from any thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from backend.api import ErrorCode, RequestId, Response
from backend.serving import pb
from backend.serving.outputs import Arrays, RowOutput

log = logging.getLogger("everbatch.serving")


class ResponseSender(Protocol):
    """Triton's, as far as it is used."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class Failure(NamedTuple):
    code: ErrorCode
    message: str


class Row:
    """One engine request of a stream. `request_id` is set by the main thread or by the first response; the rest by the
    sender.
    """

    def __init__(self, output: RowOutput, num_input_tokens: int = 0):
        self.output = output
        self.num_input_tokens = num_input_tokens
        self.request_id: RequestId | None = None
        self.failure: Failure | None = None
        self.ended = False


class Stream:
    """One Triton request while it is answered. Fields below the line are guarded by `lock`."""

    def __init__(self, sender: ResponseSender, client_request_id: str, rows: list[Row], lane: queue.SimpleQueue):
        self.sender = sender
        self.client_request_id = client_request_id  # written by the main thread only, like `namespace`
        self.namespace = ""
        self.rows = rows  # empty until the request has been read; filled under `lock`, at once
        self.first_failure: Failure | None = None  # of a row; the sender thread's
        self.lane = lane
        self.closed = False  # FINAL has been sent, or is on its way; written by the sender thread, under `gate`
        self.gate = threading.Lock()  # held by whoever asks or ends the Triton sender; never taken with `lock` held
        self.lock = threading.Lock()
        # ----
        self.inbox: deque[tuple[Row, Response]] = deque()
        self.failure: Failure | None = None
        self.answers_nothing = False  # one empty response is the whole answer
        self.queued = False
        self.cancelled = False  # somebody asked for its end
        self.abandoned = False  # the client is gone: only the end still matters

    @property
    def is_over(self) -> bool:
        """Whether nothing of it need be started any more."""
        return self.cancelled or self.closed or self.failure is not None


class ResponsePump:
    """Owns the sender threads and the set of live streams.

    `stop_rows(stream)` asks the engine to cancel what still runs; `stop_at(row, n)` to cancel one row that ended by
    its text after n output tokens; `on_row_end(row)` is told of every row that ended without an error. All called
    from sender threads.
    """

    def __init__(
        self,
        num_lanes: int,
        stop_rows: Callable[[Stream], None],
        stop_at: Callable[[Row, int], None],
        on_row_end: Callable[[Row], None] = lambda row: None,
        *,
        coalesce: bool = True,
        error_prefix: str = "",
    ):
        self._stop_rows = stop_rows
        self._coalesce = coalesce
        self._error_prefix = error_prefix
        self._stop_at = stop_at
        self._on_row_end = on_row_end
        self._lanes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(num_lanes)]
        self._live: dict[int, Stream] = {}  # insertion order
        self._live_lock = threading.Lock()
        self._num_opened = 0
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"everbatch-sender-{n}", daemon=True)
            for n, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    # ---- any thread --------------------------------------------------------------------------------------------------

    def open(self, sender: ResponseSender, client_request_id: str = "", rows: Sequence[Row] = ()) -> Stream:
        with self._live_lock:
            lane = self._lanes[self._num_opened % len(self._lanes)]
            self._num_opened += 1
            stream = Stream(sender, client_request_id, list(rows), lane)
            self._live[id(stream)] = stream
        return stream

    def deliver(self, stream: Stream, row: Row, response: Response) -> None:
        """Hand one engine response of `row` to its sender."""
        with stream.lock:
            stream.inbox.append((row, response))
            self._queue(stream)

    def fail(self, stream: Stream, code: ErrorCode, message: str) -> None:
        """End the whole stream with an error. The first failure counts; after the end it changes nothing."""
        with stream.lock:
            stream.failure = stream.failure or Failure(code, message)
            self._queue(stream)

    def refuse(self, stream: Stream, code: ErrorCode, message: str) -> None:
        """As `fail`; a stream that no sender has been given yet is ended at once, on the caller's thread: to wait for a
        sender that is busy with other streams would take longer than this round trip.
        """
        with stream.lock:
            # one that has failed may be with its sender, though it is not queued any more
            is_new = not stream.rows and not stream.queued and stream.failure is None
            stream.queued = True if is_new else stream.queued  # no sender touches it then
        if is_new:
            self._end_badly(stream, Failure(code, message))
        else:
            self.fail(stream, code, message)

    def begin(self, stream: Stream, rows: list[Row]) -> bool:
        """Give a stream its rows, before the first of them can answer. False: it has been cancelled or has failed
        meanwhile, and nothing of it may run.
        """
        with stream.lock:
            if stream.is_over:
                return False
            stream.rows.extend(rows)
            return True

    def finish_empty(self, stream: Stream) -> None:
        """Answer with one response that holds no tensor."""
        with stream.lock:
            stream.answers_nothing = True
            self._queue(stream)

    def live_streams(self) -> list[Stream]:
        """Streams without FINAL yet, oldest first."""
        with self._live_lock:
            return list(self._live.values())

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the senders finish what is queued, then end them."""
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    @staticmethod
    def _queue(stream: Stream) -> None:
        """Called with the stream's lock held."""
        if not stream.queued and not stream.closed:
            stream.queued = True
            stream.lane.put(stream)

    # ---- sender threads ----------------------------------------------------------------------------------------------

    def _run(self, lane: queue.SimpleQueue) -> None:
        while (stream := lane.get()) is not None:
            try:
                self._serve(stream)
            except Exception:  # the last line of defence: a stream without an end hangs its client and the shutdown
                log.exception("answering request %r failed", stream.client_request_id)
                self._end_badly(
                    stream, Failure(ErrorCode.INTERNAL, "the answer could not be built; see the server's log")
                )

    def _serve(self, stream: Stream) -> None:
        with stream.lock:
            stream.queued = False
            arrived, stream.inbox = stream.inbox, deque()
            failure, answers_nothing, abandoned = stream.failure, stream.answers_nothing, stream.abandoned
        if stream.closed:
            return
        if failure is not None:
            self._end_badly(stream, failure)
            return
        if answers_nothing:
            self._send(stream, pb.data_response([]), last=True)
            return
        replies: list[Any] = []
        for together in [arrived] if self._coalesce else [[one] for one in arrived]:
            touched = self._feed(stream, together)
            replies += [pb.data_response(arrays) for row in touched if (arrays := _render(row)) is not None]
        ending = all(row.ended for row in stream.rows)
        if abandoned and not ending:
            return
        if ending and stream.first_failure is not None:
            replies.append(self._error(Failure(stream.first_failure.code, _failures(stream.rows))))
        for n, reply in enumerate(replies):
            if not self._send(stream, reply, last=ending and n == len(replies) - 1):
                return

    def _feed(self, stream: Stream, arrived: Iterable[tuple[Row, Response]]) -> list[Row]:
        """Give the responses to their rows; returns the rows that got any, in the order of their first."""
        touched: dict[int, Row] = {}
        for row, response in arrived:
            if row.ended:
                continue
            touched[id(row)] = row
            if row.request_id is None:
                row.request_id = response.request_id
            if response.has_error():
                row.failure = Failure(response.error_code, response.error_msg)
                stream.first_failure = stream.first_failure or row.failure
                row.ended = True
                continue
            num_kept = row.output.feed(response.result)
            row.ended = response.result.is_final
            if row.ended:
                self._on_row_end(row)
            elif num_kept is not None:
                self._stop_at(row, num_kept)
        return list(touched.values())

    def _send(self, stream: Stream, response: Any, last: bool) -> bool:
        """Returns whether the stream may go on."""
        if last:
            self._close(stream)
        try:
            stream.sender.send(response, flags=pb.FINAL if last else 0)
        except Exception as error:  # Triton raises its own type for a full /dev/shm, a closed sender, ...
            log.error("sending to request %r failed: %s", stream.client_request_id, error)
            self._end_with(stream, Failure(ErrorCode.INTERNAL, "the server could not send a response; see its log"))
            return False
        return True

    def _end_badly(self, stream: Stream, failure: Failure) -> None:
        if not stream.closed:
            self._end_with(stream, failure)

    def _end_with(self, stream: Stream, failure: Failure) -> None:
        self._close(stream)
        try:
            self._stop_rows(stream)
        except Exception:  # what goes on in the engine costs time there; without its end the stream hangs
            log.exception("cancelling the rows of request %r failed", stream.client_request_id)
        # an end that never goes out blocks the server's shutdown: whatever fails, the next try says less
        for build in (lambda: self._error(failure), lambda: None, lambda: None):
            try:
                stream.sender.send(build(), flags=pb.FINAL)
                return
            except Exception as error:
                if "closed" in str(error):
                    return
                log.error("ending request %r failed: %s", stream.client_request_id, error)

    def _error(self, failure: Failure) -> Any:
        return pb.error_response(failure.code, self._error_prefix + failure.message)

    def _close(self, stream: Stream) -> None:
        """Before FINAL is sent: from then on nobody may ask the sender anything. `is_cancelled` after FINAL, or at the same
        moment, ends the whole server with a segmentation fault (seen with Triton 24.10).
        """
        with stream.gate, stream.lock:
            stream.closed = True
        with self._live_lock:
            self._live.pop(id(stream), None)


def _render(row: Row) -> Arrays | None:
    """What the row has to say now. The end of a row that failed is the stream's error."""
    return row.output.render(final=row.ended and row.failure is None)


def _failures(rows: list[Row]) -> str:
    """The text of a stream's error: each message once, with the rows that it holds for."""
    if len(rows) == 1:
        return "" if rows[0].failure is None else rows[0].failure.message
    by_message: dict[str, list[str]] = {}
    for n, row in enumerate(rows):
        if row.failure is not None:
            by_message.setdefault(row.failure.message, []).append(str(n))
    return "; ".join(
        f"row{'s' if len(where) > 1 else ''} {', '.join(where)}: {message}" for message, where in by_message.items()
    )
