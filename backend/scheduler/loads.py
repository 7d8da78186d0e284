"""Loads: KV that comes from the second level while its sequence waits, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.core.sequence import Sequence


class Loads(Protocol):
    queued_tokens: Callable[
        [], int
    ]  # tokens that are to be computed before those of a new admission; set by the scheduler

    def is_loading(self, seq: Sequence) -> bool:
        """True while a waiting sequence is passed over."""
        ...

    def holds_back(self, seq: Sequence, num_found_tokens: int) -> bool:
        """True if a load has been begun for a sequence that could be admitted now. To begin one changes no plan, queue or block;
        asked again, the answer is False.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has been admitted, or has left the queue."""
        ...

    def note_step(self, num_context_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts has taken so long."""
        ...
