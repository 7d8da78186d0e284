"""Mailboxes: responses that wait to be fetched by `await_responses`, per request id.

Life of an id: open -> responses arrive -> the final one arrives -> it is fetched -> closed. Waiting on a closed id yields
one error response, for there will never be another (docs/features.md 000-06).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from backend.api.errors import ErrorCode
from backend.api.request import RequestId
from backend.api.response import Response


class Mailboxes:
    def __init__(self) -> None:
        self._boxes: dict[RequestId, list[Response]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def open(self, request_id: RequestId) -> None:
        with self._changed:
            self._boxes[request_id] = []

    def forget(self, request_id: RequestId) -> None:
        """The request was never sent. Unknown ids are ignored."""
        with self._changed:
            self._boxes.pop(request_id, None)

    def put(self, response: Response) -> None:
        with self._changed:
            self._boxes[response.request_id].append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every waiter; from now on waiting returns what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def num_ready(self, request_id: RequestId | None) -> int:
        with self._changed:
            boxes = self._boxes.values() if request_id is None else [self._boxes.get(request_id, [])]
            return sum(map(len, boxes))

    def take_any(self, timeout_s: float | None) -> list[Response]:
        """All responses of all ids, once there is one; [] at the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._boxes.values()), timeout_s)
            return [response for request_id in list(self._boxes) for response in self._empty(request_id)]

    def take(self, request_id: RequestId, timeout_s: float | None) -> list[Response]:
        """Responses of one id, once there is one; [] at the timeout; one error when the id is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._boxes.get(request_id) != [], timeout_s)
            if request_id not in self._boxes:
                message = f"ReqId {request_id} has already been processed and was terminated."
                return [Response(request_id, error_or_none=message, error_code=ErrorCode.NOT_FOUND)]
            return self._empty(request_id)

    def take_each(self, request_ids: Iterable[RequestId], timeout_s: float | None) -> list[list[Response]]:
        """As `take` for several ids, in their order, within one timeout."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return [self.take(i, None if end is None else max(0.0, end - time.monotonic())) for i in request_ids]

    def _empty(self, request_id: RequestId) -> list[Response]:
        responses, self._boxes[request_id] = self._boxes[request_id], []
        if responses and responses[-1].is_final:
            del self._boxes[request_id]
        return responses
