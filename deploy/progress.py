"""Progress on a terminal before rich is installed: one line that changes; plain lines where there is no terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO


class SteppedProgress:
    """Steps that take a while, on standard error, with the seconds since the first one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._noted = -1e9
        self._text = ""

    def step(self, title: str) -> None:
        """Begin a step; its title stays on the screen."""
        self._text = ""
        self._line(f"[{self._elapsed()}] {title}")

    def note(self, text: str) -> None:
        """Show what the step does now, in place of the former note; without a terminal as a line, at most every 5 s."""
        self._text = text
        self._show(every_s=0.0 if self._live else 5.0)

    def tick(self) -> None:
        """Nothing has happened for a while: show that time goes on."""
        if self._text:
            self._show(every_s=0.0 if self._live else 15.0)

    def _show(self, every_s: float) -> None:
        now = time.monotonic()
        if now - self._noted < every_s:
            return
        self._noted = now
        text = f"[{self._elapsed()}]   {self._text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[2K" + text[:width])
            self._stream.flush()
        else:
            self._line(text)

    def done(self, title: str) -> None:
        """End of all steps."""
        self._line(f"[{self._elapsed()}] {title}")

    def _line(self, text: str) -> None:
        clear = "\r\x1b[2K" if self._live else ""
        self._stream.write(f"{clear}{text}\n")
        self._stream.flush()

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"
