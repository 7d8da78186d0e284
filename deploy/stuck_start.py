"""StuckStart: notices a start that hangs, so that it can be tried again.

Triton's locks in shared memory wait by the wall clock, and a busy machine has been seen on which some stubs never came to their
first message: the engine was ready, and the log said nothing more for minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from deploy import server_log

QUIET_S = 60.0  # stubs are loaded within seconds of the engine


class StuckStart:
    def __init__(self, log_path: Path, is_busy: Callable[[], bool]) -> None:
        """Reads lines that the log gets from now on. `is_busy`: True while a stub works, as on a large tokenizer."""
        self._path, self._is_busy = log_path, is_busy
        self._start = self._size = self._now()
        self._grown_at = time.monotonic()

    def look(self) -> bool:
        """True if the engine is ready, the log has not grown for QUIET_S, and no stub works."""
        size, now = self._now(), time.monotonic()
        if size == self._size and now - self._grown_at <= QUIET_S:
            return False
        if size != self._size or self._is_busy():
            self._size, self._grown_at = size, now
            return False
        return server_log.engine_is_ready(self._new_lines())

    def _now(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def _new_lines(self) -> list[str]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._start if self._start <= self._size else 0)  # a rotated log begins anew
            return file.read(server_log.TAIL_BYTES).decode(errors="replace").splitlines()
