"""Reads a person's messages to a chat: with a line editor on a terminal, as plain lines from anything else."""

from __future__ import annotations

import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # a terminal then marks where a paste begins and ends


class LineReader(Protocol):
    """Where turns come from."""

    def read(self) -> str | None:
        """A turn; empty after Ctrl-C; None at the end of input."""


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader(console: Console) -> LineReader:
    """`console`: where prompts go when no person types."""
    if on_terminal():
        from client.editor import EditingReader  # It takes a fifth of a second.

        return EditingReader()
    return PlainReader(console)


class PlainReader:
    """Lines of standard input, for pipes and files."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def read(self) -> str | None:
        try:
            return self._console.input("[bold green]> [/bold green]")
        except EOFError:
            self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print()
            return ""


@contextmanager
def typing_kept() -> Iterator[None]:
    """Text that is typed or pasted during a reply waits whole for the next prompt, and is not echoed.

    By lines, as terminals are otherwise read, the kernel would cut each to 4,095 bytes.
    """
    if not on_terminal():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)  # Ctrl-C is a signal still.
    try:
        yield
    finally:
        sys.stdout.write(_PASTE_OFF)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def mark_pastes() -> None:
    """Let the terminal mark pastes from now on; every prompt ends with it switched off."""
    if on_terminal():
        sys.stdout.write(_PASTE_ON)
        sys.stdout.flush()
