"""Stream: one Triton request while it is answered, and its rows. The ResponsePump (pump.py) decides what happens to it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import NamedTuple

from backend.api import ErrorCode, RequestId, Response
from backend.serving.delivery.outputs import RowOutput
from backend.serving.observe.trace_context import TraceContext
from backend.serving.protocols import ResponseSender

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
