"""gpt-oss writes an answer as messages in channels (Harmony):

    <|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The channel `analysis` is reasoning, `final` content, and so is `commentary` without a recipient; to=functions.NAME may also stand
ahead of <|channel|>. The prompt ends with <|start|>assistant. <|return|> and <|call|> end the answer, and may be hidden.
"""

from __future__ import annotations

import re
from typing import Any

from gateway.messages import Function
from gateway.parts import Part, Reasoning
from gateway.tool_formats.format import Functions, ToolFormat, call_of, schema_of
from gateway.tool_formats.source import NotACall, Parsing, Source, json_value

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]+)")
_HEADS = (START, CHANNEL, " to=")  # texts that begin a message
MAX_HEAD = 512  # characters between <|start|> and <|message|>


class Harmony(ToolFormat):
    """The tool format of such models. Answers are read by HarmonyReader, because calls are messages among others."""

    special = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    start = f"{START}assistant"
    answer = f"{CHANNEL}final{MESSAGE}"

    def read(self, source: Source, functions: Functions) -> Parsing:
        raise NotACall
        yield

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f"{CHANNEL}commentary to=functions.{function.name} {CONSTRAIN}json{MESSAGE}"
        return {"begin": begin, "schema": schema_of(function), "end": ""}


class HarmonyReader:
    """A PartReader of an answer in channels. An answer that does not begin with one is content."""

    def __init__(self) -> None:
        self._held = ""
        self._head = ""  # recipient and channel of the message that is being read
        self._is_head = True  # the head is being read
        self._body: list[str] = []  # the arguments of a call so far
        self._recipient: str | None = None
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        found: list[Part] = []
        while self._step(found):
            pass
        return found

    def flush(self) -> list[Part]:
        found: list[Part] = []
        if self._is_head:
            found += [] if not self._held or self._held.startswith(_HEADS) else [self._held]  # a head is a mark itself
        else:
            self._add(self._held, found)
            self._end(found)
        self._held = ""
        return found

    def _step(self, found: list[Part]) -> bool:
        """Move the held text on to `found` as far as its kind is known. False if more text is needed."""
        if self._is_head:
            return self._read_head(found)
        ends = [(place, mark) for mark in (END, CALL, RETURN, START) if (place := self._held.find(mark)) >= 0]
        if ends:
            place, mark = min(ends)
            self._add(self._held[:place], found)
            self._held = self._held[place + (0 if mark == START else len(mark)) :]
            self._end(found)
            return True
        keep = max(_overlap(self._held, mark) for mark in (END, CALL, RETURN, START))
        self._add(self._held[: len(self._held) - keep], found)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _read_head(self, found: list[Part]) -> bool:
        text = self._held
        place = text.find(MESSAGE)
        begins = any(text.startswith(mark) or mark.startswith(text) for mark in _HEADS)
        if not text or (begins and place < 0 and len(text) < MAX_HEAD + len(MESSAGE)):
            return False
        self._is_head, self._head, self._recipient = False, "", None
        if begins and 0 <= place <= MAX_HEAD:
            self._head, self._held = text[:place], text[place + len(MESSAGE) :]
            called = _RECIPIENT.search(self._head)
            self._recipient = None if called is None else called[1]
        else:  # no message: content up to the next one
            self._add(text[0], found)
            self._held = text[1:]
        return True

    def _add(self, text: str, found: list[Part]) -> None:
        if not text:
            return
        if self._recipient is not None:
            self._body.append(text)
        else:
            found.append(Reasoning(text) if f"{CHANNEL}analysis" in self._head else text)

    def _end(self, found: list[Part]) -> None:
        """The message is over. A call that is none, or was cut off, is content, with its head."""
        if self._recipient is not None:
            body = "".join(self._body)
            try:
                found.append(call_of(self._recipient, json_value(body)))
                self.num_calls += 1
            except NotACall:
                found.append(f"{self._head}{MESSAGE}{body}")
        self._body, self._recipient, self._is_head = [], None, True


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
