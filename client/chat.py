"""The `chat` command: a conversation between a terminal and a client."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from client.client import EverbatchClient
from client.conversation import Conversation
from client.errors import ClientError
from client.images import read_image
from client.line_reader import line_reader, mark_pastes, on_terminal, typing_kept
from client.option_names import on_the_command_line
from client.options import GenerateOptions
from client.statistics import AnswerClock
from client.terminal import write

HELP = """/image FILE  send the image with the next turn; several may wait for it
/reset  start afresh: the conversation so far is forgotten
/help   these lines
/exit   leave, as do /quit and Ctrl-D
Ctrl-C ends a reply, and the chat goes on. Alt-Enter begins a new line, Enter sends. A paste of many lines is one turn.
When the conversation no longer fits into the model's context, the oldest turns are left out, and you are told."""
LEAVE = ("/exit", "/quit")


HOPELESS = ("UNREACHABLE", "NOT_FOUND", "UNAUTHENTICATED", "UNKNOWN")  # at the first turn: no other would do better


def run_chat(
    client: EverbatchClient,
    system: str | None,
    options: GenerateOptions,
    introduction: str | None = None,
    images: Sequence[str] = (),
) -> int:
    """Converse until /exit or end of input; `introduction` says who answers, `images` go with the first turn. Returns the exit
    status: 0, or 1 where turns came from a pipe and one failed.

    On a terminal everything is shown there. Else standard output gets the replies alone, and standard error the rest.
    Raises ClientError when no server that can be asked is there at the first turn.
    """
    interactive = on_terminal()
    console = Console(stderr=not interactive)
    chat = Chat(console, Conversation(client, system, **options), options.get("max_tokens", 0), images)
    reader = line_reader(console)
    _dim(console, escape(introduction or client.url))
    _dim(console, "/help tells the commands, /exit or Ctrl-D leaves, Ctrl-C ends a reply")
    try:
        with typing_kept():
            while (text := reader.read()) is not None and text.strip() not in LEAVE:
                chat.take(text)
        chat.conversation.end()
    finally:
        client.close()
    return 1 if chat.failed and not interactive else 0


class Chat:
    """A conversation, and what is shown of it."""

    def __init__(
        self, console: Console, conversation: Conversation, max_tokens: int, images: Sequence[str] = ()
    ) -> None:
        self.conversation = conversation
        self._console = console
        self._max_tokens = max_tokens
        self._turns = 0
        self._images = list(images)  # that go with the next turn
        self.failed = False  # any turn

    def take(self, text: str) -> None:
        """A command or a turn; nothing for blanks. Raises ClientError when the first turn is hopeless."""
        word = text.strip()
        if word == "/reset":
            self.conversation.end()
            self.conversation.reset()
            _dim(self._console, "new conversation")
        elif word.partition(" ")[0] == "/image" and "\n" not in word:
            self._attach(word.removeprefix("/image").strip())
        elif word == "/help":
            _dim(self._console, HELP)
        elif word.startswith("/") and "\n" not in word:
            _dim(self._console, f"{escape(word.split()[0])} is no command; there are /image, /reset, /help and /exit")
        elif word:
            self._turn(text.rstrip())
            self._turns += 1

    def _attach(self, name: str) -> None:
        if not name:
            self._show("/image has no file; write /image FILE")
            return
        try:
            self._images.append(read_image(name))
        except ValueError as error:
            self._show(str(error))
            return
        count = len(self._images)
        waiting = "it goes" if count == 1 else f"{count} images go"
        _dim(self._console, f"{escape(name)} is read; {waiting} with the next turn")

    def _turn(self, text: str) -> None:
        """One reply with its statistics; errors are shown, and end the program only where the first is hopeless."""
        clock = AnswerClock()
        left_out = self.conversation.left_out
        images, self._images = self._images, []
        stream = self.conversation.say(text, images)
        mark_pastes()
        try:
            for chunk in stream:
                clock.add(chunk)
                write(chunk.text)
        except KeyboardInterrupt:
            stream.close()  # This cancels the request. The conversation keeps what was shown.
            self._console.print(" ...", end="", highlight=False)
        except ClientError as error:
            if self._turns == 0 and error.code in HOPELESS:
                raise
            self.failed = True
            self._images = images  # The turn is taken back, and they go with the next one.
            write("\n" * bool(clock.text))
            self._show_error(error)
            return
        write("" if clock.text.endswith("\n") else os.linesep)
        _dim(self._console, clock.summary())
        self._tell_of_a_full_context(clock, self.conversation.left_out - left_out)

    def _show_error(self, error: ClientError) -> None:
        remedy = "; send less, or start afresh with /reset" if error.is_too_long else ""
        self._show(f"{on_the_command_line(str(error))}{remedy}")

    def _show(self, fault: str) -> None:
        self._console.print(f"[red]{escape(fault)}[/red]", highlight=False, soft_wrap=True)

    def _tell_of_a_full_context(self, clock: AnswerClock, left_out: int) -> None:
        if left_out:
            turns = "the oldest turn was" if left_out == 1 else f"the {left_out} oldest turns were"
            _dim(self._console, f"the context was full: {turns} left out, and the model no longer knows of it")
        answer = clock.completion()
        if answer.finish_reason == "length" and answer.num_output_tokens < self._max_tokens:
            _dim(self._console, "the context is full, which cut this reply; the next turn leaves the oldest out")


def _dim(console: Console, text: str) -> None:
    console.print(f"[dim]{text}[/dim]", highlight=False, soft_wrap=True)
