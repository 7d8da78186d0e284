"""Reads from the server's log that the engine process has ended, and what its owner does about it.

The stub that started the engine knows with which status or by which signal it ended; the launcher only sees that a model is
not ready. So the monitor reads the new lines of the log.
"""

from __future__ import annotations

import re
from pathlib import Path

from deploy.processes import describe_end
from deploy.server_log import plain

MAX_BYTES = 1 << 20  # the most that one look reads: of a log that grows faster, the end
_EVENT = re.compile(r"everbatch\.(?:supervisor|replicas): ((?:the engine (?:process|died)|replica \d+|no replica) .+)")
_ENDED = re.compile(r"^(the engine process|replica \d+) ended with code (-?\d+)")


class EngineEvents:
    """Follows one log from where it ends now. One thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._size()
        self._rest = b""

    def fresh(self) -> list[str]:
        """The events in the lines that were completed since the last call, oldest first."""
        try:
            return self._events(self._size())
        except FileNotFoundError:  # Somebody removed the log just now, and with it what it would have told.
            return []

    def _events(self, size: int) -> list[str]:
        if size < self._position:  # The log was put aside and emptied.
            self._position, self._rest = 0, b""
        if size == self._position:
            return []
        start = max(self._position, size - MAX_BYTES)
        if start > self._position:  # The half of a line and what has been left out do not make one.
            self._rest = b""
        with self._path.open("rb") as file:
            file.seek(start)
            content = self._rest + file.read(MAX_BYTES)
            self._position = file.tell()
        *lines, self._rest = content.split(b"\n")
        self._rest = self._rest[-MAX_BYTES:]
        texts = (plain(line.decode(errors="replace")) for line in lines)
        return [_in_words(match.group(1)) for text in texts if (match := _EVENT.search(text))]

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0


def _in_words(event: str) -> str:
    """The event with the engine's exit status explained."""
    return _ENDED.sub(lambda match: f"{match.group(1)} {describe_end(int(match.group(2)))}", event.strip())
