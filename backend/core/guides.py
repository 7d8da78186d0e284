"""Guides: the compiler of guides as the engine sees it.

A request whose guide is not compiled yet waits outside the queue, so that it delays no other request. A compiled guide is kept
until the last request that uses it has ended, also while that request is paused or evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.api.errors import EverbatchError
from backend.api.guide import Guide
from backend.api.request import RequestId

OnCompiled = Callable[
    [RequestId, EverbatchError | None], None
]  # (request, why its guide cannot be used); None: it can be used


class Guides(Protocol):
    def on_compiled(self, tell: OnCompiled) -> None:
        """`tell` is called from other threads, once for each live request whose `begin` returned False."""
        ...

    def begin(self, request_id: RequestId, guide: Guide, namespace: str) -> bool:
        """Compile a guide for a request of a namespace. Returns True if it is compiled already. Raises Overloaded if too many
        guides of this namespace wait.
        """
        ...

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        """The keywords that the compiled guide of a live request does not hold, with their places."""
        ...

    def end(self, request_id: RequestId) -> None:
        """Note that a request has ended. Unknown ids are ignored."""
        ...
