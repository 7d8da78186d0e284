"""StopMatcher: finds the first stop string in a stream of text, and holds back text that may be the start of one.

The match that ends first counts; if several end at the same character, the longest. So the result depends only on the text, not
on how it is split into pieces, and a match is reported with its last character.

The automaton is that of Aho and Corasick (Efficient String Matching, CACM 1975). After each character its state stands for
the longest end of the text with which a stop string begins, and exactly that end is held back. The time is linear in the
length of the text, whatever the number of stop strings. The memory is linear in the total length of the stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from backend.api.errors import InvalidRequest


class StopMatcher:
    """Watches one stream. After a match, `end` is the number of its characters up to the end of the stop string."""

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self._stops = list(dict.fromkeys(stops))
        if "" in self._stops:
            raise InvalidRequest("a stop string is empty, at least one character is needed; leave it out")
        self._include_stop = include_stop
        self._build()
        self._state = 0
        self._held = ""  # the text that the state stands for
        self.end = 0  # the number of characters taken in until a match
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take in more text. Returns the text that may be shown now, and the stop string that ended the stream or None.

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
        """Build the automaton. Each state is a beginning of a stop string, and state 0 is the empty one.

        `_fail` leads from a state to the longest other state with which its text ends.
        """
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop_at: list[str | None] = [None]  # the longest stop string with which the state's text ends
        for stop in self._stops:
            self._insert(stop)
        self._first_chars = frozenset(self._next[0])
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:  # Breadth first, so that the state to which `_fail` leads is complete, because it is shallower.
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
