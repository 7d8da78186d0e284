"""StopMatcher: finds the first stop string in a stream of text, and never lets out the beginning of one.

Which match wins: the one that ends first; of those that end at the same character, the longest. So the result is a
function of the text alone, however it is cut into pieces, and a match is reported as soon as its last character is
there.

The automaton is Aho and Corasick's (Efficient String Matching, CACM 1975): after each character its state is the
longest end of the text that begins a stop string, and that end is exactly what is held back. Time is linear in the
text, whatever the number of stop strings; memory is linear in their total length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from backend.api.errors import InvalidRequest


class StopMatcher:
    """Watches one stream. `end` is, after a match, the number of its characters up to and including the stop."""

    def __init__(self, stops: Iterable[str], include_stop: bool = False):
        self._stops = list(dict.fromkeys(stops))
        if "" in self._stops:
            raise InvalidRequest("a stop string is empty, at least one character is needed; leave it out")
        self._include_stop = include_stop
        self._build()
        self._state = 0
        self._held = ""  # == the text of the state
        self.end = 0  # characters taken in; stands still after a match
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take in more text; return (text that may be shown, the stop string that ended the stream or None).

        After a match the rest of the stream is ignored.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._state and self._first_chars.isdisjoint(text):
            self.end += len(text)
            return text, None
        seen = self._held + text
        for i, char in enumerate(text):
            self._step(char)
            stop = self._stop_at[self._state]
            if stop is not None:
                return self._match(seen[: len(self._held) + i + 1], stop)
        self.end += len(text)
        cut = len(seen) - self._depth[self._state]
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The stream is over: return what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _match(self, seen: str, stop: str) -> tuple[str, str]:
        self.end += len(seen) - len(self._held)
        self.matched = stop
        self._held = ""
        return (seen if self._include_stop else seen[: len(seen) - len(stop)]), stop

    def _step(self, char: str) -> None:
        state = self._state
        while state and char not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(char, 0)

    def _build(self) -> None:
        """States are the beginnings of stops, 0 the empty one; `_fail` leads to the longest proper end that is one."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop_at: list[str | None] = [None]  # the longest stop that ends in this state
        for stop in self._stops:
            self._insert(stop)
        self._first_chars = frozenset(self._next[0])
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:  # breadth first: a state's fail is shallower, hence complete
            state = queue.popleft()
            if self._stop_at[state] is None:
                self._stop_at[state] = self._stop_at[self._fail[state]]
            for char, child in self._next[state].items():
                fail = self._fail[state]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                queue.append(child)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop_at.append(None)
            state = self._next[state][char]
        self._stop_at[state] = stop
