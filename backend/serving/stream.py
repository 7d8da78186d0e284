"""Stream: one Triton request while it is answered, and its rows. The ResponsePump (pump.py) decides what happens to it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

from backend.api import ErrorCode, Request, RequestId, Response
from backend.serving.observe.trace_context import TraceContext
from backend.serving.protocols import ResponseSender
from backend.serving.work import RowOutput, Work

Lane = queue.SimpleQueue["Stream | None"]  # None ends the lane's sender thread


class Failure(NamedTuple):
    """Why a row or a stream failed."""

    code: ErrorCode
    message: str


class OutputRow:
    """One engine request of a stream.

    `request_id` is set by the thread that submits the request, or with the first response. The sender sets all else.
    """

    def __init__(
        self,
        output: RowOutput,
        num_input_tokens: int = 0,
        num_sequences: int = 1,
        is_request: bool = True,
        takes_long: bool = False,
    ) -> None:
        self.output = output
        self.num_input_tokens = num_input_tokens
        self.num_sequences = num_sequences  # number of sequences that the engine returns, beams included
        self.is_request = (
            is_request  # True if tokens are asked for; a row that stops a session, or is answered at once, is none
        )
        self.takes_long = takes_long  # to build a response of it
        self.request_id: RequestId | None = None
        self.failure: Failure | None = None
        self.ended = False

    @classmethod
    def of(cls, work: Work) -> OutputRow:
        if not isinstance(work.request, Request):
            return cls(work.output, is_request=False)
        config = work.request.sampling_config
        num_sequences = config.num_return_sequences or config.beam_width
        return cls(work.output, len(work.request.input_token_ids), num_sequences, takes_long=work.takes_long)


class Stream:
    """One Triton request while it is answered. `lock` guards the fields below the line."""

    def __init__(self, sender: ResponseSender, client_request_id: str, rows: list[OutputRow], lane: Lane) -> None:
        self.sender = sender
        self.client_request_id = client_request_id  # Only the main thread writes it, and `namespace`.
        self.namespace = ""
        self.trace: TraceContext | None = None  # None: it is not traced; written by the main thread
        self.rows = rows  # empty until the request has been read; then all rows are added together, under `lock`
        self.first_failure: Failure | None = None  # the failure that came first of any row
        self.lane = lane
        self.received_ns = time.monotonic_ns()
        self.closed = False  # True if FINAL has been sent or is being sent; written with both locks held
        self.gate = threading.Lock()  # held to ask the Triton sender or to close the stream; never taken within `lock`
        self.lock = threading.Lock()
        # ----
        self.inbox: deque[tuple[OutputRow, Response]] = deque()
        self.failure: Failure | None = None
        self.answers_nothing = False  # True if one empty response is the whole answer
        self.queued = False  # True if it waits in its lane
        self.cancelled = False  # True if its end has been requested
        self.abandoned = False  # True if its client is gone, so that only its end is still sent

    @property
    def is_over(self) -> bool:
        """True if the stream has ended or is about to end, so that no part of it need be started any more."""
        return self.cancelled or self.closed or self.failure is not None


class Answers(Protocol):
    """What `intake` needs of the ResponsePump (delivery/pump.py), which documents it. Any thread may call it."""

    def begin(self, stream: Stream, rows: list[OutputRow]) -> bool: ...

    def deliver(self, stream: Stream, row: OutputRow, response: Response) -> None: ...

    def fail(self, stream: Stream, code: ErrorCode, message: str) -> None: ...

    def refuse(self, stream: Stream, code: ErrorCode, message: str) -> None: ...

    def stop_rows(self, stream: Stream) -> None: ...

    def answer_stop(self, stream: Stream) -> None: ...
