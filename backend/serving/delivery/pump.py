"""ResponsePump: brings the engine's responses to Triton, with a few sender threads that coalesce them.

    engine reader --deliver()--> stream.inbox --(stream queued at most once)--> lane --> sender --send()--> Triton

A lane is the queue of one sender thread. These are the rules:
  - A stream is one Triton request of one or more rows. From its rows on it stays with one lane, so its responses keep their
    order, and only that lane's thread touches its row outputs and sends with its Triton sender.
  - A stream with a row whose response takes long to build goes to a lane for such streams, where it holds up no others.
  - Responses that arrive while a send is in flight are joined into the next response, unless each token is to have one of its own
    (`coalesce` off).
  - FINAL is sent exactly once per stream, with its last data or error response. It has no response of its own, unless
    sending failed.
  - A row's error ends that row only. It is held back until all rows have ended, and is then the stream's last response.
    Several failed rows share one error: its code is that of the row that failed first, and its text names each row.
    Nothing is ever sent after an error, because Triton 24.10 may not survive that (docs/design/serving.md).
  - A failure of the whole stream (`fail`) ends all its rows with one error.
  - The thread that refuses a new request answers it itself (`refuse`), so that a refusal does not wait behind streams.
  - A send that raises ends the stream: the pump tries to send an error with FINAL, then twice FINAL alone, and cancels the
    stream's rows in the engine.
  - `deliver`, `fail` and `open` never block, and any thread may call them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backend.api import ErrorCode, EverbatchError, InvalidRequest, Response
from backend.serving import pb
from backend.serving.delivery.cancellation import EngineRows
from backend.serving.dialect import PLAIN, Dialect
from backend.serving.protocols import ResponseSender
from backend.serving.stream import Failure, Lane, OutputRow, Stream

log = logging.getLogger("everbatch.serving")
NO_REQUEST_ID = "A request id must be provided for request cancellation"
STOPPED_EARLY = "the request was cancelled before its text had been read"


class ResponsePump:
    """Owns the sender threads and the set of live streams.

    `engine_rows` stops rows in the engine. `on_row_end(stream, row, response)` hears once of the final
    response of each row, also when the stream has ended before. `on_refused(stream, failure)` hears of a stream that failed
    before it had rows. Sender threads call all three; a thread that refuses a request calls the first and the last too, and one
    that delivers `on_row_end`.
    """

    def __init__(
        self,
        num_lanes: int,
        engine_rows: EngineRows,
        on_row_end: Callable[[Stream, OutputRow, Response], None] = lambda stream, row, response: None,
        *,
        on_refused: Callable[[Stream, Failure], None] = lambda stream, failure: None,
        coalesce: bool = True,
        dialect: Dialect = PLAIN,
    ) -> None:
        self._engine_rows = engine_rows
        self._coalesce = coalesce
        self._dialect = dialect
        self._on_row_end = on_row_end
        self._on_refused = on_refused
        self._lanes: list[Lane] = [queue.SimpleQueue() for _ in range(num_lanes)]
        self._long_lane: Lane = queue.SimpleQueue()
        self._live: dict[int, Stream] = {}  # by the stream's id(); the oldest stream comes first
        self._live_lock = threading.Lock()
        self._num_opened = 0
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"everbatch-sender-{n}", daemon=True)
            for n, lane in enumerate([*self._lanes, self._long_lane])
        ]
        for thread in self._threads:
            thread.start()

    # ---- any thread --------------------------------------------------------------------------------------------------

    def open(self, sender: ResponseSender, client_request_id: str = "", rows: Sequence[OutputRow] = ()) -> Stream:
        """Make a stream and assign it to a lane. It is live from now on."""
        with self._live_lock:
            lane = self._lanes[self._num_opened % len(self._lanes)]
            self._num_opened += 1
            stream = Stream(sender, client_request_id, list(rows), lane)
            self._live[id(stream)] = stream
        return stream

    def deliver(self, stream: Stream, row: OutputRow, response: Response) -> None:
        """Queue one engine response of `row` for the stream's sender thread."""
        with stream.lock:
            is_late = stream.closed
            if not is_late:
                stream.inbox.append((row, response))
                self._queue(stream)
        if is_late:
            self._note_late_ends(stream, [(row, response)])

    def fail(self, stream: Stream, code: ErrorCode, message: str) -> None:
        """End the whole stream with an error. Only its first failure counts, and none once the stream has ended."""
        with stream.lock:
            stream.failure = stream.failure or Failure(code, message)
            self._queue(stream)

    def refuse(self, stream: Stream, code: ErrorCode, message: str) -> None:
        """Fail a stream. If no sender has been given it yet, it is ended at once, on the caller's thread.

        A sender may be busy with other streams, and to wait for it would take longer than this one round trip.
        """
        with stream.lock:
            # A stream that has failed may be in its sender's hands though it is not queued any more.
            is_new = not stream.rows and not stream.queued and stream.failure is None
            stream.queued = True if is_new else stream.queued  # Marked as queued, it is not given to a sender any more.
        if is_new:
            self._end_badly(stream, Failure(code, message))
        else:
            self.fail(stream, code, message)

    def begin(self, stream: Stream, rows: list[OutputRow]) -> bool:
        """Give a stream its rows, before the first of them can answer.

        Returns False when the stream has been cancelled or has failed meanwhile; then nothing of it may run.
        """
        with stream.lock:
            if stream.is_over:
                return False
            stream.rows.extend(rows)
            if any(row.takes_long for row in rows) and not stream.queued:
                stream.lane = self._long_lane
            return True

    def answer_stop(self, stream: Stream) -> None:
        """Cancel the newest live request with the id and the namespace of this `stop: true`, and answer: with one response that
        holds no tensor, or with the dialect's error. The answer is the same when there is no such request. Raises
        InvalidRequest when the id is empty.
        """
        if not stream.client_request_id:
            raise InvalidRequest(NO_REQUEST_ID)
        for candidate in reversed(self.live_streams()):
            same_id = candidate.client_request_id == stream.client_request_id
            is_request = not candidate.answers_nothing and candidate is not stream  # A `stop: true` stops no other one.
            if is_request and same_id and candidate.namespace == stream.namespace:
                self.cancel(candidate)
                break
        with stream.lock:
            stream.answers_nothing = True
            if stop_error := self._dialect.stop_error:
                stream.failure = stream.failure or Failure(ErrorCode.CANCELLED, stop_error)
            self._queue(stream)

    def cancel(self, stream: Stream) -> None:
        """Ask for the end of a stream. The engine's final response ends it, or an error before it has rows."""
        with stream.lock:
            if stream.cancelled:
                return
            stream.cancelled = True
            runs = bool(stream.rows)
        if runs:
            self.stop_rows(stream)
        else:  # The request waits for a text thread, or one is reading it.
            self.fail(stream, ErrorCode.CANCELLED, STOPPED_EARLY)

    def abandon(self, stream: Stream) -> None:
        """Cancel a stream whose client is gone."""
        stream.abandoned = True
        self.cancel(stream)

    def stop_rows(self, stream: Stream) -> None:
        """Ask the engine to cancel all rows of a stream that still run."""
        self._engine_rows.stop(stream)

    def live_streams(self) -> list[Stream]:
        """The streams whose FINAL has not been sent, the oldest first."""
        with self._live_lock:
            return list(self._live.values())

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the senders finish what is queued, then end them. Waits up to `timeout_s` seconds for each."""
        for lane in (*self._lanes, self._long_lane):
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    @staticmethod
    def _queue(stream: Stream) -> None:
        """Put the stream into its lane unless it waits there already. The caller holds the stream's lock."""
        if not stream.queued and not stream.closed:
            stream.queued = True
            stream.lane.put(stream)

    # ---- sender threads ----------------------------------------------------------------------------------------------

    def _run(self, lane: Lane) -> None:
        while (stream := lane.get()) is not None:
            with stream.lock:
                stream.queued = False
                arrived, stream.inbox = stream.inbox, deque()
            try:
                self._serve(stream, arrived)
            except EverbatchError as error:  # A renderer says so that an error is the end of its row.
                self._end_badly(stream, Failure(error.code, error.message))
            except Exception:
                # Whatever went wrong, the stream must be ended, because otherwise its client and the shutdown would hang.
                log.exception("answering request %r failed", stream.client_request_id)
                self._end_badly(
                    stream, Failure(ErrorCode.INTERNAL, "the answer could not be built; see the server's log")
                )
            if stream.closed:
                self._note_late_ends(stream, arrived)

    def _serve(self, stream: Stream, arrived: Iterable[tuple[OutputRow, Response]]) -> None:
        with stream.lock:
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
            replies += [pb.data_response(arrays) for row in touched for arrays in row.output.render()]
        ending = all(row.ended for row in stream.rows)
        if abandoned and not ending:
            return
        if ending and stream.first_failure is not None:
            replies.append(self._error(Failure(stream.first_failure.code, _failures(stream.rows))))
        for n, reply in enumerate(replies):
            if not self._send(stream, reply, last=ending and n == len(replies) - 1):
                return

    def _feed(self, stream: Stream, arrived: Iterable[tuple[OutputRow, Response]]) -> list[OutputRow]:
        """Give each response to its row. Returns the rows that got one, in the order in which they got their first."""
        touched: dict[int, OutputRow] = {}
        for row, response in arrived:
            if row.ended:
                continue
            touched[id(row)] = row
            if row.request_id is None:
                row.request_id = response.request_id
            if response.has_error():
                row.failure = Failure(response.error_code, response.error_msg)
                stream.first_failure = stream.first_failure or row.failure
                self._end_row(stream, row, response)
                continue
            num_kept = row.output.feed(response.result)
            if response.result.is_final:
                self._end_row(stream, row, response)
            elif num_kept is not None:
                self._engine_rows.stop_at(row, response.result.sequence_index, num_kept)
        return list(touched.values())

    def _end_row(self, stream: Stream, row: OutputRow, response: Response) -> None:
        row.ended = True
        self._on_row_end(stream, row, response)

    def _note_late_ends(self, stream: Stream, arrived: Iterable[tuple[OutputRow, Response]]) -> None:
        """Rows of a closed stream still end in the engine; only `on_row_end` is notified."""
        try:
            for row, response in arrived:
                if response.is_final and not row.ended:
                    self._end_row(stream, row, response)
        except Exception:  # The stream has its end already, and this thread has others to serve.
            log.exception("noting the end of request %r failed", stream.client_request_id)

    def _send(self, stream: Stream, response: Any, last: bool) -> bool:
        """Send one response, with FINAL if it is the last. Returns whether the stream may go on."""
        if last:
            self._close(stream)
        try:
            stream.sender.send(response, flags=pb.FINAL if last else 0)
        except Exception as error:
            # Triton raises for many reasons, such as a full /dev/shm or a closed sender. For each the stream must be ended.
            log.error("sending to request %r failed: %s", stream.client_request_id, error)
            self._end_with(stream, Failure(ErrorCode.INTERNAL, "the server could not send a response; see its log"))
            return False
        return True

    def _end_badly(self, stream: Stream, failure: Failure) -> None:
        if not stream.closed:
            self._end_with(stream, failure)

    def _end_with(self, stream: Stream, failure: Failure) -> None:
        self._close(stream)
        if not stream.rows:
            self._on_refused(stream, failure)
        try:
            self.stop_rows(stream)
        except Exception:
            # A row that goes on only costs the engine time, but without its end the stream would hang.
            log.exception("cancelling the rows of request %r failed", stream.client_request_id)
        # The server cannot shut down while a stream has no end, so when a try fails the next one sends less.
        for build in (lambda: self._error(failure), lambda: None, lambda: None):
            try:
                stream.sender.send(build(), flags=pb.FINAL)
                return
            except Exception as error:
                # Triton has one type for all reasons, so only the text says that the stream has had its end already.
                if "closed" in str(error):
                    return
                log.error("ending request %r failed: %s", stream.client_request_id, error)

    def _error(self, failure: Failure) -> Any:
        return pb.error_response(failure.code, self._dialect.error_text(failure.code, failure.message))

    def _close(self, stream: Stream) -> None:
        """Mark the stream as closed before its FINAL is sent. From then on its sender must not be used.

        `is_cancelled` after FINAL, or at the same moment, ends the whole server with a segmentation fault (seen with Triton
        24.10).
        """
        with stream.gate, stream.lock:
            was_closed, stream.closed = stream.closed, True
        if self._dialect.log_name and stream.abandoned and not was_closed:
            log.info("[%s] Successfully cancelled the request", self._dialect.log_name)
        with self._live_lock:
            self._live.pop(id(stream), None)


def _failures(rows: list[OutputRow]) -> str:
    """The text of a stream's error. It holds each message once, with the numbers of the rows that failed with it."""
    if len(rows) == 1:
        return "" if rows[0].failure is None else rows[0].failure.message
    by_message: dict[str, list[str]] = {}
    for n, row in enumerate(rows):
        if row.failure is not None:
            by_message.setdefault(row.failure.message, []).append(str(n))
    return "; ".join(
        f"row{'s' if len(where) > 1 else ''} {', '.join(where)}: {message}" for message, where in by_message.items()
    )
