"""The output of a response while it grows: messages, reasoning and calls, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.items import Item, call_item, message_item, new_id, reasoning_item
from gateway.parts import Call, Part, PartReader, Reasoning
from gateway.triton_client import Piece


@dataclass
class TextItem:
    """A message or reasoning, which grows until an item of another kind or the end comes."""

    place: int
    is_reasoning: bool = False
    id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)  # for messages only
    content: list[Item] = field(default_factory=list)  # its text as one part, once it has ended

    def __post_init__(self) -> None:
        self.id = self.id or new_id("rs" if self.is_reasoning else "msg")

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def kind(self) -> str:
        """The type of its content, and the name of its events."""
        return "reasoning_text" if self.is_reasoning else "output_text"

    def item(self, status: str) -> Item:
        own: Item = {"id": self.id, "type": "reasoning" if self.is_reasoning else "message", "status": status}
        further: Item = {"summary": []} if self.is_reasoning else {"role": "assistant"}
        return own | further | {"content": self.content}

    def part(self, text: str, logprobs: Any) -> Item:
        part: Item = {"type": self.kind, "text": text}
        return part if self.is_reasoning else part | {"annotations": [], "logprobs": logprobs}

    def where(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.place, "content_index": 0}

    def kept(self) -> Item:
        """The item as it is kept for later turns: without log-probabilities."""
        if self.is_reasoning:
            return reasoning_item(self.text, self.id)
        return message_item("assistant", self.text, self.id)


@dataclass
class Growth:
    """Text that one piece adds to an item."""

    item: TextItem
    is_new: bool
    text: str
    logprobs: list[msgspec.Raw]


@dataclass
class Called:
    """A call of the output. It is complete when it is published."""

    place: int
    item: Item


class Output:
    """The items of one answer, in their order. `reader` None: all of it is one message."""

    def __init__(self, reader: PartReader | None) -> None:
        self.entries: list[TextItem | Called] = []
        self._reader = reader
        self._blank = ""  # white space that is sent only if text follows it
        self._waiting: list[msgspec.Raw] = []  # log-probabilities of what is held back

    def add(self, piece: Piece) -> Iterator[Growth | Called]:
        """Take in a piece, and yield what is new: text of an item, or a call."""
        self._waiting += piece.logprobs or []
        if self._reader is None:
            yield self._grown(piece.text)
            return
        is_last = piece.finish_reason is not None
        for part in (*self._reader.push(piece.text), *(self._reader.flush() if is_last else ())):
            yield from self._add_part(part)
        if is_last and not self.entries:
            yield self._grown(self._blank)

    def _add_part(self, part: Part) -> Iterator[Growth | Called]:
        match part:
            case Call():
                self._waiting, self._blank = [], ""
                called = Called(len(self.entries), call_item(part.id, part.name, part.arguments))
                self.entries.append(called)
                yield called
            case Reasoning():
                self._waiting = []
                yield self._grown(part.text, is_reasoning=True)
            case str():
                self._blank += part
                open_item = self.open_item()
                if self._blank.strip() or (open_item is not None and not open_item.is_reasoning):
                    yield self._grown(self._blank)

    def open_item(self) -> TextItem | None:
        last = self.entries[-1] if self.entries else None
        return last if isinstance(last, TextItem) else None

    def _grown(self, text: str, is_reasoning: bool = False) -> Growth:
        item = self.open_item()
        is_new = item is None or item.is_reasoning is not is_reasoning
        if item is None or is_new:
            item = TextItem(len(self.entries), is_reasoning)
            self.entries.append(item)
        item.texts.append(text)
        item.logprobs += self._waiting
        growth = Growth(item, is_new, text, self._waiting)
        self._waiting, self._blank = [], ""
        return growth
