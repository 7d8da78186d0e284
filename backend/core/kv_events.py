"""KvEventSink: where an engine's KV events go besides the programs that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.api.stats import BlocksStored, KvEvent


class KvEventSink(Protocol):
    """The engine's thread calls it. No method waits."""

    def start(self, block_size: int) -> None:
        """The pool was made. `block_size`: tokens of a block."""
        ...

    def offer(self, events: list[KvEvent], cached: Callable[[], list[BlocksStored]]) -> None:
        """At least one event, in order. `cached` returns what can be found behind these events; it costs as much as that is."""
        ...

    def close(self) -> None:
        """No more events will come. Safe to call twice."""
        ...
