"""Deadlines: finds live requests whose deadline has passed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from backend.api.request import RequestId
from backend.core.sequence import Sequence


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId]] = []  # may contain finished requests, which are skipped

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, seq: Sequence, live: Mapping[RequestId, Sequence]) -> None:
        """Add the deadline of a request. Entries of finished requests are removed once they are the majority."""
        if len(self._heap) > 2 * len(live) + 64:
            entries = [(other.deadline_ns, request_id) for request_id, other in live.items()]
            self._heap = [(ns, request_id) for ns, request_id in entries if ns is not None]
            heapq.heapify(self._heap)
        elif seq.deadline_ns is not None:
            heapq.heappush(self._heap, (seq.deadline_ns, seq.request_id))

    def pop_due(self, now_ns: int, live: Mapping[RequestId, Sequence]) -> Iterator[Sequence]:
        """Yield the requests whose deadline has passed, earliest first. Each is looked up only when it is yielded."""
        while self._heap and self._heap[0][0] <= now_ns:
            deadline_ns, request_id = heapq.heappop(self._heap)
            seq = live.get(request_id)
            if seq is not None and seq.deadline_ns == deadline_ns:
                yield seq
