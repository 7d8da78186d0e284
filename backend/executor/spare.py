"""Spare: a process that waits with its libraries loaded, and becomes the engine process when that one has ended.

Loading Python, torch and the kernels takes longer than mapping weights that are kept packed, so a pause is shorter by that much
(docs/reliability.md). A spare holds no weights and no KV.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable

log = logging.getLogger("everbatch.supervisor")
GO = "go\n"  # the line on its standard input that calls it


class Spare:
    """The caller makes sure that one thread at a time calls its methods."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]]) -> None:
        """`start`: starts a process that waits for GO. May raise OSError."""
        self._start = start
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start a process, unless there is one."""
        if self.is_there:
            return
        try:
            self._process = self._start()
        except OSError as error:
            log.error("a spare engine process cannot be started: %s", error.strerror)

    def take(self) -> subprocess.Popen[str] | None:
        """Call the process, and give it to the caller. None if there is none that lives."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None, "it was started with a pipe"
        try:
            process.stdin.write(GO)
            process.stdin.flush()
        except OSError:  # it has died at this moment
            process.kill()
            process.wait()
            return None
        return process

    def stop(self) -> None:
        """End the process. It has nothing to lose."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
