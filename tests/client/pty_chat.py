"""`chat` on a terminal of its own, typed to and read by a test."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deploy import ROOT

CHAT = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from client.cli import app
app(["chat", "--url", sys.argv[1]])
"""
PASTE_ON = "\x1b[?2004h"  # what a terminal is told before it may mark pastes
PATIENCE_S = 30


class PtyChat:
    """What was shown so far is `seen`."""

    def __init__(self, controller: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = ""
        self._controller = controller
        self._read = 0

    def wait_for(self, text: str) -> str:
        """Read until `text` is shown after what was waited for before. AssertionError with what was shown instead."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.seen.find(text, self._read)) < 0:
            assert time.monotonic() < deadline and self._take_in(), f"no {text!r} in {self.seen[self._read :]!r}"
        self._read = found + len(text)
        return self.seen

    def prompt(self) -> None:
        """Wait until the editor reads keys."""
        self.wait_for(PASTE_ON)
        self.wait_for("> ")

    def type(self, text: str) -> None:
        """Send keys. What is shown meanwhile is read, so that neither side waits for the other."""
        left = text.encode()
        while left:
            _, writable, _ = select.select([], [self._controller], [], 0.05)
            if writable:
                left = left[os.write(self._controller, left[:512]) :]
            while select.select([self._controller], [], [], 0)[0] and self._take_in():
                pass

    def paste(self, text: str) -> None:
        """As a terminal does that marks pastes; line ends are carriage returns then."""
        self.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def end(self) -> int:
        """Wait for the end of the program. Returns its status."""
        while self._take_in():
            pass
        return self.process.wait(PATIENCE_S)

    def _take_in(self) -> bool:
        if not select.select([self._controller], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # Linux's way to say that the program has closed the terminal.
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


@contextmanager
def chatting(url: str) -> Iterator[PtyChat]:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", CHAT, url], stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT,
        env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        yield PtyChat(controller, process)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
