"""WaitingQueue: sequences that wait for a slot, in this order:

    1. paused sequences, in the order of their admission
    2. all others, higher priorities first; within a priority weighted round robin over namespaces, within a namespace round
       robin over requests; the sequences of a request keep their order. A new namespace or request starts at the end of its
       round
    3. except that a priority which has not been served for `max_overtakes` admissions comes next, for one sequence
    4. sequences of priority BACKGROUND behind all of these, in the same order among themselves: paused ones first

With one sequence for each request, one namespace and one priority that is the order of acceptance. A request for a hundred
sequences, or a client with a hundred requests, delays the others by one sequence in each round.

Round robin over queues is J. Nagle's fair queueing (RFC 970); a namespace of weight n takes n turns in each round.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from backend.api.request import BACKGROUND, RequestId
from backend.core.sequence import Sequence, Status

MAX_OVERTAKES = 64


@dataclass(slots=True)
class _Line:
    """The waiting requests of one namespace and priority, in the order in which they are served."""

    weight: int  # turns in each round
    num_turns: int = 0  # taken in this round
    requests: OrderedDict[RequestId, deque[Sequence]] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences, round robin over the requests."""
        flows: Collection[deque[Sequence]] = self.requests.values()
        turn = 0
        while flows:
            for flow in flows:
                yield flow[turn]
            turn += 1
            flows = [flow for flow in flows if len(flow) > turn]


_Level = OrderedDict[str, _Line]  # the namespaces of a priority, in the order in which they are served


class WaitingQueue:
    def __init__(self, weights: Mapping[str, int] | None = None, max_overtakes: int = MAX_OVERTAKES) -> None:
        """`weights`: turns of a namespace in each round, 1 where it has none. `max_overtakes`: 0 = no bound."""
        self._weights, self._max_overtakes = weights or {}, max_overtakes
        self._paused: deque[Sequence] = deque()
        self._levels: dict[float, _Level] = {}  # by priority, without BACKGROUND
        self._background: _Level = OrderedDict()
        self._paused_background: deque[Sequence] = deque()
        self._priorities: list[float] = []  # the keys of _levels, negated, ascending
        # Priority -> number of admissions when it was last served or appeared; the one that waits longest comes first.
        self._served_at: OrderedDict[float, int] = OrderedDict()
        self._num_admissions = 0
        self._length = 0
        self._num_by_namespace: Counter[str] = Counter()
        self._tokens_by_namespace: Counter[str] = Counter()
        self.num_tokens = 0  # token ids of all waiting sequences, for the queue limit
        self.num_background = 0  # waiting sequences of priority BACKGROUND, and their token ids
        self.num_background_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of admission. The queue must not change meanwhile."""
        return chain(self._paused, self._by_priority(), self._paused_background, _in_turns(self._background))

    def _by_priority(self) -> Iterator[Sequence]:
        if len(self._levels) < 2:
            for level in self._levels.values():
                yield from _in_turns(level)
            return
        lines = {priority: _in_turns(level) for priority, level in self._levels.items()}
        priorities, served_at, num_admissions = list(self._priorities), self._served_at.copy(), self._num_admissions
        while priorities:
            longest = next(iter(served_at))
            is_starved = 0 < self._max_overtakes <= num_admissions - served_at[longest]
            priority = longest if is_starved else -priorities[0]
            seq = next(lines[priority], None)
            if seq is None:
                del served_at[priority]
                priorities.remove(-priority)
                continue
            num_admissions += 1
            served_at[priority] = num_admissions
            served_at.move_to_end(priority)
            yield seq

    @property
    def head(self) -> Sequence | None:
        return next(iter(self), None)

    @property
    def num_paused(self) -> int:
        return len(self._paused) + len(self._paused_background)

    def num_of(self, namespace: str) -> int:
        """Waiting sequences of a namespace."""
        return self._num_by_namespace[namespace]

    def num_tokens_of(self, namespace: str) -> int:
        """Token ids of the requests of a namespace that wait."""
        return self._tokens_by_namespace[namespace]

    def append(self, seq: Sequence) -> None:
        """Add a newly accepted sequence behind the other sequences of its request."""
        priority, namespace = seq.request.priority, seq.request.cache_salt
        if priority != BACKGROUND and priority not in self._levels:
            self._levels[priority] = OrderedDict()
            insort(self._priorities, -priority)
            self._served_at[priority] = self._num_admissions
        level = self._level(priority)
        if namespace not in level:
            level[namespace] = _Line(self._weights.get(namespace, 1))
        level[namespace].requests.setdefault(seq.request_id, deque()).append(seq)
        self._count(seq, 1)

    def _level(self, priority: float) -> _Level:
        return self._background if priority == BACKGROUND else self._levels.get(priority, OrderedDict())

    def _paused_like(self, seq: Sequence) -> deque[Sequence]:
        """The line of paused sequences that a sequence belongs to."""
        return self._paused_background if seq.request.is_background else self._paused

    def put_back(self, seq: Sequence) -> None:
        """Put a sequence that was just paused at the front. Of several, the youngest must be put back first."""
        self._paused_like(seq).appendleft(seq)
        self._count(seq, 1)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted, and count the turn of its request, its namespace and its priority."""
        priority, namespace = seq.request.priority, seq.request.cache_salt
        is_paused = seq.status is Status.PAUSED
        self.remove(seq)
        if is_paused:
            return
        self._num_admissions += 1
        if priority in self._levels:
            self._served_at[priority] = self._num_admissions
            self._served_at.move_to_end(priority)
        line = self._level(priority).get(namespace)
        if line is None:
            return
        if seq.request_id in line.requests:
            line.requests.move_to_end(seq.request_id)
        line.num_turns += 1
        if line.num_turns >= line.weight:
            line.num_turns = 0
            self._level(priority).move_to_end(namespace)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is not admitted. Raises ValueError if it is not in the queue."""
        if seq.status is Status.PAUSED:
            self._paused_like(seq).remove(seq)
        else:
            self._remove_from_line(seq)
        self._count(seq, -1)

    def _remove_from_line(self, seq: Sequence) -> None:
        priority, namespace = seq.request.priority, seq.request.cache_salt
        level = self._level(priority)
        line = level.get(namespace)
        if line is None or seq.request_id not in line.requests:
            raise ValueError(f"{seq!r} does not wait")
        line.requests[seq.request_id].remove(seq)
        if not line.requests[seq.request_id]:
            del line.requests[seq.request_id]
        if not line.requests:
            del level[namespace]
        if not level and priority != BACKGROUND:
            del self._levels[priority], self._served_at[priority]
            self._priorities.remove(-priority)

    def _count(self, seq: Sequence, sign: int) -> None:
        namespace = seq.request.cache_salt
        self._length += sign
        self.num_tokens += sign * seq.num_tokens
        if seq.request.is_background:
            self.num_background += sign
            self.num_background_tokens += sign * seq.num_tokens
        self._num_by_namespace[namespace] += sign
        self._tokens_by_namespace[namespace] += sign * seq.num_tokens
        if not self._num_by_namespace[namespace]:
            del self._num_by_namespace[namespace], self._tokens_by_namespace[namespace]


def _in_turns(level: _Level) -> Iterator[Sequence]:
    """Yield as many sequences of each namespace as it has turns, then again of each that has more. Lazy."""
    lines: Iterable[tuple[_Line, Iterator[Sequence]]] = [(line, iter(line)) for line in level.values()]
    first_round = True
    while lines:
        left = []
        for line, sequences in lines:
            num_turns = line.weight - line.num_turns if first_round else line.weight
            num_taken = 0
            for seq in islice(sequences, num_turns):
                num_taken += 1
                yield seq
            if num_taken == num_turns:
                left.append((line, sequences))
        lines, first_round = left, False
