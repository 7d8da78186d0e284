"""The Response object of /v1/responses, and the events that tell how it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.formats import shown_format
from gateway.items import Item, call_item, message_item, new_id
from gateway.logprobs import chat_columns, columns_of, encoded
from gateway.response_messages import ResponseRequest
from gateway.tools import Call, CallReader, wants_calls
from gateway.triton_client import Piece, Usage
from gateway.turns import Turns

encode = msgspec.json.encode


@dataclass
class _Message:
    """A message of the output, which grows until a call or the end comes."""

    place: int
    id: str = field(default_factory=lambda: new_id("msg"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    content: list[Item] = field(default_factory=list)  # its text as one part, once it has ended

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": self.content}

    def where(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.place, "content_index": 0}


@dataclass
class _Growth:
    """The part of a message that one piece adds."""

    message: _Message
    is_new: bool
    text: str
    logprobs: list[msgspec.Raw]


@dataclass
class _Called:
    """A call of the output. It is complete when it is published."""

    place: int
    item: Item


class _Output:
    """The messages and the calls of one answer, in their order."""

    def __init__(self, has_calls: bool) -> None:
        self.entries: list[_Message | _Called] = []
        self._reader = CallReader() if has_calls else None
        self._blank = ""  # white space that is sent only if text follows it
        self._waiting: list[msgspec.Raw] = []  # log-probabilities of what is held back

    def add(self, piece: Piece) -> Iterator[_Growth | _Called]:
        """Take in a piece, and yield what is new: text of a message, or a call."""
        self._waiting += piece.logprobs or []
        if self._reader is None:
            yield self._grown(piece.text)
            return
        is_last = piece.finish_reason is not None
        for part in (*self._reader.push(piece.text), self._reader.flush() if is_last else ""):
            if isinstance(part, Call):
                self._waiting, self._blank = [], ""
                called = _Called(len(self.entries), call_item(part.id, part.name, part.arguments))
                self.entries.append(called)
                yield called
            elif self._blank or part:
                self._blank += part
                if self._blank.strip() or self.open_message() is not None:
                    yield self._grown(self._blank)
        if is_last and not self.entries:
            yield self._grown(self._blank)

    def open_message(self) -> _Message | None:
        last = self.entries[-1] if self.entries else None
        return last if isinstance(last, _Message) else None

    def _grown(self, text: str) -> _Growth:
        message = self.open_message()
        is_new = message is None
        if message is None:
            message = _Message(len(self.entries))
            self.entries.append(message)
        message.texts.append(text)
        message.logprobs += self._waiting
        growth = _Growth(message, is_new, text, self._waiting)
        self._waiting, self._blank = [], ""
        return growth


class ResponseWriter:
    """One response: `take` or `events` of each piece in order, `finished`, and `closing`."""

    def __init__(self, message: ResponseRequest, turns: Turns) -> None:
        self.id = new_id("resp")
        self._message, self._turns = message, turns
        self._created = int(time.time())
        self._sequence_number = 0
        self._output = _Output(wants_calls(message))
        self._usage = Usage()
        self._is_cut = False

    def take(self, piece: Piece) -> list[_Growth | _Called]:
        """A piece of the answer; returns what it adds to the output."""
        self._usage = piece.usage or self._usage
        self._is_cut = piece.finish_reason == "length"
        return list(self._output.add(piece))

    async def events(self, piece: Piece) -> bytes:
        """The events for a piece. The first one's are preceded by what opens the response."""
        events = []
        if not self._sequence_number:
            response = self.body("in_progress")
            events += [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        before = self._output.open_message()
        for new in self.take(piece):
            if isinstance(new, _Growth):
                events += self._growth(new)
                before = new.message
                continue
            if before is not None:
                events.append(await self._ended(before))
                before = None
            events += self._call(new)
        return b"".join(events)

    def _growth(self, new: _Growth) -> Iterator[bytes]:
        where = new.message.where()
        if new.is_new:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = new.message.item("in_progress")
            yield self._event("response.output_item.added", output_index=new.message.place, item=item)
            yield self._event("response.content_part.added", **where, part=part)
        if new.text or new.logprobs:
            logprobs = columns_of(new.logprobs, chat_columns)["content"]
            yield self._event("response.output_text.delta", **where, delta=new.text, logprobs=logprobs)

    def _call(self, called: _Called) -> Iterator[bytes]:
        place, item = called.place, called.item
        where, arguments = {"item_id": item["id"], "output_index": place}, item["arguments"]
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=place, item=item)

    async def _ended(self, message: _Message, status: str = "completed") -> bytes:
        """The last events of a message."""
        part = await self._part(message)
        values = {"text": part["text"], "logprobs": part["logprobs"]}
        where, item = message.where(), message.item(status)
        return b"".join(
            (
                self._event("response.output_text.done", **where, **values),
                self._event("response.content_part.done", **where, part=part),
                self._event("response.output_item.done", output_index=message.place, item=item),
            )
        )

    async def _part(self, message: _Message) -> Item:
        """The whole text of a message that has ended."""
        if not message.content:
            logprobs = (await encoded(message.logprobs, chat_columns, self._turns))["content"]
            text = "".join(message.texts)
            message.content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
        return message.content[0]

    async def finished(self) -> dict[str, Any]:
        """The Response object of a complete answer, or of one that was cut at its limit."""
        status = "incomplete" if self._is_cut else "completed"
        last = self._output.open_message()
        output = []
        for entry in self._output.entries:
            if isinstance(entry, _Message):
                await self._part(entry)
                output.append(entry.item(status if entry is last else "completed"))
            else:
                output.append(entry.item)
        return self.body(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "completed_at": None if self._is_cut else int(time.time()),
            "output": output,
            "usage": _usage(self._usage),
        }

    async def closing(self, body: dict[str, Any]) -> bytes:
        """The last events, `body` being what `finished` made."""
        last = self._output.open_message()
        ends = b"" if last is None else await self._ended(last, body["status"])
        return ends + self._event(f"response.{body['status']}", response=body)

    def items(self) -> tuple[Item, ...]:
        """The output of a complete answer without log-probabilities, for later turns."""
        entries = self._output.entries
        return tuple(
            message_item("assistant", "".join(entry.texts), entry.id) if isinstance(entry, _Message) else entry.item
            for entry in entries
        )

    def failure(self, error: GatewayError) -> bytes:
        """The last event of a response that failed after it had begun."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = self.body("failed") | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=body)

    def body(self, status: str) -> dict[str, Any]:
        """The Response object without output."""
        message = self._message
        choice, given = message.tool_choice or "auto", message.conversation
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "conversation": None if given is None else {"id": given if isinstance(given, str) else given.id},
            "error": None,
            "incomplete_details": None,
            "instructions": message.instructions,
            "max_output_tokens": message.max_output_tokens,
            "metadata": message.metadata or {},
            "model": message.model,
            "output": [],
            "parallel_tool_calls": True if message.parallel_tool_calls is None else message.parallel_tool_calls,
            "reasoning": None if message.reasoning is None else message.reasoning.model_dump(),
            "previous_response_id": message.previous_response_id,
            "service_tier": None if message.service_tier is None else "default",
            "store": message.store is not False,
            "temperature": 1.0 if message.temperature is None else message.temperature,
            "text": {"format": shown_format(None if message.text is None else message.text.format)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in message.tools or []],
            "top_logprobs": message.top_logprobs or 0,
            "top_p": 1.0 if message.top_p is None else message.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": message.user,
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, **values, "sequence_number": self._next()})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _next(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
