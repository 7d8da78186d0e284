"""What `generate` and `chat` do with a client and a terminal.

Model text goes to standard output as it comes and is never read as markup; control characters other than newline and
tab are dropped, so that no model can move the cursor or rename the window.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from client.client import EverbatchClient
from client.conversation import Conversation
from client.errors import ClientError
from client.statistics import AnswerClock

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HARMFUL = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text without terminal control characters."""
    return text.translate(_HARMFUL)


def write(text: str) -> None:
    """Model text to standard output: cleaned on a terminal, unchanged into a pipe."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def run_generate(client: EverbatchClient, prompt: str, options: dict[str, Any], timeout_s: float, quiet: bool) -> int:
    """Stream one completion. Returns the exit status: 0, or 130 after Ctrl-C (which cancels). Raises ClientError."""
    clock = AnswerClock()
    stream = client.stream(prompt, timeout_s=timeout_s, **options)
    status = 0
    echoed = False
    try:
        for chunk in stream:
            if not echoed and sys.stdout.isatty():
                sys.stdout.write(f"{_DIM}{printable(prompt)}{_PLAIN}")
            echoed = True
            clock.add(chunk)
            write(chunk.text)
    except KeyboardInterrupt:
        status = 130
    except ClientError:
        write("\n" * bool(clock.text))
        raise
    finally:
        stream.close()
        client.close()
    if sys.stdout.isatty() or not clock.text.endswith("\n"):
        write("\n")
    if not quiet:
        Console(stderr=True).print(f"[dim]{clock.summary()}[/dim]", highlight=False, soft_wrap=True)
    return status


def run_chat(client: EverbatchClient, system: str | None, options: dict[str, Any]) -> int:
    """Converse until /quit or end of input. Returns 0. Raises ClientError when no server answers at the first turn."""
    console = Console()
    conversation = Conversation(client, system, **options)
    help_line = f"{client.url}: /reset starts afresh, /quit or Ctrl-D leaves, Ctrl-C ends a reply"
    console.print(f"[dim]{help_line}[/dim]", highlight=False, soft_wrap=True)
    turns = 0
    try:
        while (text := _read_line(console)) is not None:
            if text == "/quit":
                break
            if text == "/reset":
                conversation.end()
                conversation.reset()
                console.print("[dim]new conversation[/dim]")
            elif text.startswith("/"):
                console.print(f"[dim]{escape(text.split()[0])} is no command; there are /reset and /quit[/dim]")
            elif text:
                _turn(console, conversation, text, first=turns == 0)
                turns += 1
        conversation.end()
    finally:
        client.close()
    return 0


def _read_line(console: Console) -> str | None:
    """A line from the user, stripped; empty after Ctrl-C; None at the end of input."""
    try:
        return console.input("[bold green]> [/bold green]").strip()
    except EOFError:
        console.print()
        return None
    except KeyboardInterrupt:
        console.print()
        return ""


def _turn(console: Console, conversation: Conversation, text: str, *, first: bool) -> None:
    """One reply with its statistics; errors are shown, and end the program only when there never was a server."""
    clock = AnswerClock()
    stream = conversation.say(text)
    try:
        for chunk in stream:
            clock.add(chunk)
            write(chunk.text)
    except KeyboardInterrupt:
        stream.close()  # This cancels the request. The conversation keeps what was shown.
        write(" ...")
    except ClientError as error:
        if first and error.code == "UNREACHABLE":
            raise
        write("\n" * bool(clock.text))
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        return
    write("" if clock.text.endswith("\n") else os.linesep)
    console.print(f"[dim]{clock.summary()}[/dim]", highlight=False, soft_wrap=True)
