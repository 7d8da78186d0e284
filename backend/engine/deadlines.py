"""Deadlines: which live requests are past theirs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from backend.api.request import RequestId
from backend.core.sequence import Sequence


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId]] = []  # holds entries of finished requests, which are skipped

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, seq: Sequence, live: Mapping[RequestId, Sequence]) -> None:
        """Enter the deadline of a request. Entries of finished ones are thrown out once they are the greater part."""
        if len(self._heap) > 2 * len(live) + 64:
            entries = [(other.deadline_ns, request_id) for request_id, other in live.items()]
            self._heap = [(ns, request_id) for ns, request_id in entries if ns is not None]
            heapq.heapify(self._heap)
        elif seq.deadline_ns is not None:
            heapq.heappush(self._heap, (seq.deadline_ns, seq.request_id))

    def pop_due(self, now_ns: int, live: Mapping[RequestId, Sequence]) -> Iterator[Sequence]:
        """The requests whose deadline has come, the earliest first; each is looked up when its turn comes."""
        while self._heap and self._heap[0][0] <= now_ns:
            deadline_ns, request_id = heapq.heappop(self._heap)
            seq = live.get(request_id)
            if seq is not None and seq.deadline_ns == deadline_ns:
                yield seq
