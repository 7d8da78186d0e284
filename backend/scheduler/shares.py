"""Shares: keeps a namespace that fills the batch from delaying the others.

A namespace crowds the batch if it holds more than half of the slots while others ask as well. Its waiting sequences leave the
last slots to the others, and its prompts wait while theirs are computed. A namespace that is alone has the whole batch.
"""

from __future__ import annotations

from collections import Counter, deque

from backend.api.request import Request

RECENT = 64  # admissions: a namespace that had none of the latest ones does not count as asking


class Shares:
    def __init__(self, max_batch_size: int) -> None:
        self._most = max_batch_size // 2
        self._running: Counter[str] = Counter()  # sequences of each namespace
        self._latest: deque[str] = deque()  # namespaces of the latest admissions
        self._recent: Counter[str] = Counter()  # the same, counted

    def admit(self, request: Request) -> None:
        """A sequence has got a slot. One of the background gives it up for anybody, so it does not count."""
        if request.is_background:
            return
        namespace = request.cache_salt
        self._running[namespace] += 1
        self._latest.append(namespace)
        self._recent[namespace] += 1
        if len(self._latest) > RECENT:
            oldest = self._latest.popleft()
            self._recent[oldest] -= 1
            if not self._recent[oldest]:
                del self._recent[oldest]

    def leave(self, request: Request) -> None:
        """A sequence has given its slot back."""
        if request.is_background:
            return
        namespace = request.cache_salt
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]

    @property
    def is_contended(self) -> bool:
        """True while several namespaces ask."""
        return len(self._recent) > 1

    def crowds(self, namespace: str, num_planned: int = 0) -> bool:
        """True if others ask, and the namespace holds more than half of the slots, with `num_planned` that it is about to get."""
        others_ask = len(self._recent) > (namespace in self._recent)
        return others_ask and self._running[namespace] + num_planned > self._most
