"""Held: requests whose guides are being compiled. They are live, but nothing else in the engine knows them yet."""

from __future__ import annotations

from collections.abc import Iterator

from backend.api.request import Request, RequestId
from backend.core.guides import Guides, OnCompiled


class Held:
    def __init__(self, guides: Guides | None) -> None:
        """`guides`: None where requests with guides are refused."""
        self._guides = guides
        self._requests: dict[RequestId, tuple[Request, int]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(list(self._requests))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def on_compiled(self, tell: OnCompiled) -> None:
        """`tell` is called from other threads, as core.guides says."""
        if self._guides is not None:
            self._guides.on_compiled(tell)

    def hold(self, request_id: RequestId, request: Request, now_ns: int) -> bool:
        """Have the request's guide compiled. False where there is none, or it is compiled already. Raises Overloaded."""
        if self._guides is None or request.guide is None or self._guides.begin(request_id, request.guide):
            return False
        self._requests[request_id] = request, now_ns
        return True

    def take(self, request_id: RequestId) -> tuple[Request, int] | None:
        """Hold it no longer. Returns the request and when it came; None for ids that are not known."""
        return self._requests.pop(request_id, None)

    def take_all(self) -> list[tuple[RequestId, Request]]:
        """Hold none any longer; their guides need not be kept for them."""
        taken = [(request_id, request) for request_id, (request, _) in self._requests.items()]
        self._requests.clear()
        for request_id, request in taken:
            self.end(request_id, request)
        return taken

    def end(self, request_id: RequestId, request: Request) -> None:
        """The request is over, whether it was held or not: its guide need not be kept for it."""
        if self._guides is not None and request.guide is not None:
            self._guides.end(request_id)
