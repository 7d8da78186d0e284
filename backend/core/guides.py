"""Guides: who compiles the guides of requests, as the engine sees it.

A request with a guide that is not compiled yet waits beside the queue until it is, and nobody else does. What has been
compiled for a live request stays compiled until its end, also while the request is paused or evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.api.guide import Guide
from backend.api.request import RequestId

OnCompiled = Callable[[RequestId, str], None]  # the request, and why its guide cannot be used; '' = it can


class Guides(Protocol):
    def on_compiled(self, tell: OnCompiled) -> None:
        """`tell` is called from other threads, once for each request whose `begin` returned False and that has not ended."""
        ...

    def begin(self, request_id: RequestId, guide: Guide) -> bool:
        """Compile a guide for a request. Returns True when that is done already. Raises Overloaded when too many wait."""
        ...

    def end(self, request_id: RequestId) -> None:
        """The request is over. Ids that are not known are ignored."""
        ...
