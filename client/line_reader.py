"""What a person says to a chat: an editor on a terminal, plain lines from anything else."""

from __future__ import annotations

import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # a terminal then marks where a paste begins and ends


class LineReader(Protocol):
    """Where turns come from."""

    def read(self) -> str | None:
        """A turn; empty after Ctrl-C; None at the end of input."""


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader(console: Console) -> LineReader:
    return EditingReader() if on_terminal() else PlainReader(console)


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


class EditingReader:
    """Line editing and a history; a paste is one turn however many lines it has, and of any length."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession  # It takes a fifth of a second.
        from prompt_toolkit.formatted_text import FormattedText

        prompt = FormattedText([("ansigreen bold", "> ")])
        self._session: PromptSession[str] = PromptSession(
            prompt, key_bindings=_newline_keys(), prompt_continuation="  ", enable_suspend=True
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""


def _newline_keys() -> KeyBindings:
    """Alt-Enter begins a new line of the turn; Enter sends it."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


@contextmanager
def typing_kept() -> Iterator[None]:
    """What is typed or pasted while nobody reads, during a reply, waits whole for the next prompt and is not shown.

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
