"""Mailboxes: keeps responses by request id until `await_responses` fetches them.

The box of a request is opened before the request is sent, and goes when its final response has been fetched. Whoever asks
for a box that is gone gets one error response, because there will never be another response (docs/features.md 000-06).
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta

from backend.api.errors import ErrorCode
from backend.api.request import RequestId
from backend.api.response import Response


class Mailboxes:
    """Any thread may call its methods."""

    def __init__(self) -> None:
        self._boxes: dict[RequestId, list[Response]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def open(self, request_id: RequestId) -> None:
        with self._changed:
            self._boxes[request_id] = []

    def forget(self, request_id: RequestId) -> None:
        """Drop the box of a request that was never sent. Unknown ids are ignored."""
        with self._changed:
            self._boxes.pop(request_id, None)

    def put(self, response: Response) -> None:
        with self._changed:
            self._boxes[response.request_id].append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters. Later calls do not wait: they return the responses that are there."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def num_ready(self, request_id: RequestId | None) -> int:
        """How many responses wait to be fetched, of one id or of all (None)."""
        with self._changed:
            boxes = self._boxes.values() if request_id is None else [self._boxes.get(request_id, [])]
            return sum(map(len, boxes))

    def take_any(self, timeout_s: float | None) -> list[Response]:
        """Wait for a response of any id, and return all that are there; [] after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._boxes.values()), timeout_s)
            return [response for request_id in list(self._boxes) for response in self._empty(request_id)]

    def take(self, request_id: RequestId, timeout_s: float | None) -> list[Response]:
        """Wait for a response of one id, and return all its responses; [] after the timeout.

        An id whose box is gone, or never was there, gives one error response.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._boxes.get(request_id) != [], timeout_s)
            if request_id not in self._boxes:
                message = f"ReqId {request_id} has already been processed and was terminated."
                return [Response(request_id, error_or_none=message, error_code=ErrorCode.NOT_FOUND)]
            return self._empty(request_id)

    def take_each(self, request_ids: Iterable[RequestId], timeout_s: float | None) -> list[list[Response]]:
        """Call `take` for several ids one after the other, with one timeout for all of them."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return [self.take(i, None if end is None else max(0.0, end - time.monotonic())) for i in request_ids]

    def _empty(self, request_id: RequestId) -> list[Response]:
        responses, self._boxes[request_id] = self._boxes[request_id], []
        if responses and responses[-1].is_final:
            del self._boxes[request_id]
        return responses


class ResponseReader:
    """The part of an Executor that hands out responses of enqueued requests."""

    _mailboxes: Mailboxes

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineUnavailable after `shutdown`."""

    def await_responses(
        self, ids: RequestId | list[RequestId] | timedelta | None = None, timeout: timedelta | float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Fetch responses of enqueued requests: of all (None), of one id, or of several ids, which gives a list of lists.

        Blocks until there is a response, at most for `timeout` (seconds or timedelta; None waits for ever), after which the
        list is empty. Raises EngineUnavailable after `shutdown`.
        """
        self._check_open()
        if isinstance(ids, timedelta):
            ids, timeout = None, ids
        timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if ids is None:
            return self._mailboxes.take_any(timeout_s)
        if isinstance(ids, list):
            return self._mailboxes.take_each(ids, timeout_s)
        return self._mailboxes.take(ids, timeout_s)

    def get_num_responses_ready(self, request_id: RequestId | None = None) -> int:
        self._check_open()
        return self._mailboxes.num_ready(request_id)
