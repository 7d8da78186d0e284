"""The editor of a chat on a terminal: line editing, a history, and a paste as one turn however long it is."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys


class EditingReader:
    """A LineReader. Its history is that of the chat, and is written nowhere."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("ansigreen bold", "> ")]),
            input=BurstInput(sys.stdin),
            key_bindings=newline_keys(),
            prompt_continuation="  ",
            enable_suspend=True,
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""


class BurstInput(Vt100Input):
    """Takes characters that came together as one paste: key by key, 20 kB from a terminal that marks no pastes would take
    the editor half a minute.
    """

    def read_keys(self) -> list[KeyPress]:
        return list(merged(super().read_keys()))


def merged(keys: Iterable[KeyPress]) -> Iterator[KeyPress]:
    """Runs of characters as one paste each. The one behind an Escape stays itself: both together are a key with Alt."""
    after_escape = False
    for is_text, group in itertools.groupby(keys, lambda press: not isinstance(press.key, Keys)):
        run = list(group)
        if is_text and after_escape:
            yield run.pop(0)
        if is_text and len(run) > 1:
            yield KeyPress(Keys.BracketedPaste, "".join(press.data for press in run))
        else:
            yield from run
        after_escape = not is_text and run[-1].key is Keys.Escape


def newline_keys() -> KeyBindings:
    """Alt-Enter begins a new line of the turn; Enter sends it."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
