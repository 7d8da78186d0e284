"""WaitingQueue: sequences that wait for a slot, in this order:

    1. paused sequences, in the order of their admission
    2. all others, higher priorities first; within a priority round robin over namespaces, within a namespace round robin over
       requests; the sequences of a request keep their order. A new namespace or request starts at the end of its round

With one sequence for each request and one namespace that is the order of acceptance. A request for a hundred sequences, or a
client with a hundred requests, delays the others by one sequence in each round.

Round robin over queues is J. Nagle's fair queueing (RFC 970).
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator

from backend.api.request import RequestId
from backend.core.sequence import Sequence, Status

_Requests = OrderedDict[
    RequestId, deque[Sequence]
]  # the requests of one namespace, in the order in which they are served


class WaitingQueue:
    def __init__(self) -> None:
        self._paused: deque[Sequence] = deque()
        self._levels: dict[
            float, OrderedDict[str, _Requests]
        ] = {}  # priority -> namespaces, in the order in which they are served
        self._priorities: list[float] = []  # the keys of _levels, negated, ascending
        self._length = 0
        self.num_tokens = 0  # token ids of all waiting sequences, for the queue limit

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of admission. The queue must not change meanwhile."""
        yield from self._paused
        for priority in self._priorities:
            yield from _in_turns(self._levels[-priority])

    @property
    def head(self) -> Sequence | None:
        return next(iter(self), None)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def append(self, seq: Sequence) -> None:
        """Add a newly accepted sequence behind the other sequences of its request."""
        priority, namespace = seq.request.priority, seq.request.cache_salt
        if priority not in self._levels:
            self._levels[priority] = OrderedDict()
            insort(self._priorities, -priority)
        requests = self._levels[priority].setdefault(namespace, OrderedDict())
        requests.setdefault(seq.request_id, deque()).append(seq)
        self._count(seq, 1)

    def put_back(self, seq: Sequence) -> None:
        """Put a sequence that was just paused at the front. Of several, the youngest must be put back first."""
        self._paused.appendleft(seq)
        self._count(seq, 1)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted, and move its request and namespace to the end of their rounds."""
        priority, namespace = seq.request.priority, seq.request.cache_salt
        is_paused = seq.status is Status.PAUSED
        self.remove(seq)
        if not is_paused and namespace in self._levels.get(priority, ()):
            namespaces = self._levels[priority]
            namespaces.move_to_end(namespace)
            if seq.request_id in namespaces[namespace]:
                namespaces[namespace].move_to_end(seq.request_id)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is not admitted. Raises ValueError if it is not in the queue."""
        if seq.status is Status.PAUSED:
            self._paused.remove(seq)
        else:
            self._remove_from_line(seq)
        self._count(seq, -1)

    def _remove_from_line(self, seq: Sequence) -> None:
        priority, namespace = seq.request.priority, seq.request.cache_salt
        namespaces = self._levels.get(priority, OrderedDict())
        requests = namespaces.get(namespace, OrderedDict())
        if seq.request_id not in requests:
            raise ValueError(f"{seq!r} does not wait")
        requests[seq.request_id].remove(seq)
        if not requests[seq.request_id]:
            del requests[seq.request_id]
        if not requests:
            del namespaces[namespace]
        if not namespaces:
            del self._levels[priority]
            self._priorities.remove(-priority)

    def _count(self, seq: Sequence, sign: int) -> None:
        self._length += sign
        self.num_tokens += sign * seq.num_tokens


def _in_turns(namespaces: OrderedDict[str, _Requests]) -> Iterator[Sequence]:
    """Yield one sequence of each namespace, then a second one of each that has it, and so on. Lazy."""
    lines: Iterable[Iterator[Sequence]] = map(_of_requests, namespaces.values())
    while lines:
        left = []
        for line in lines:
            seq = next(line, None)
            if seq is not None:
                yield seq
                left.append(line)
        lines = left


def _of_requests(requests: _Requests) -> Iterator[Sequence]:
    """Yield the sequences of one namespace, round robin over its requests."""
    flows: Collection[deque[Sequence]] = requests.values()
    turn = 0
    while flows:
        for flow in flows:
            yield flow[turn]
        turn += 1
        flows = [flow for flow in flows if len(flow) > turn]
