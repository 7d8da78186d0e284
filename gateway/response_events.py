"""The Response object of /v1/responses, and the events that tell how it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.formats import shown_format
from gateway.items import Item, new_id
from gateway.logprobs import chat_columns, columns_of, encoded
from gateway.parts import PartReader
from gateway.response_messages import ResponseRequest
from gateway.response_output import Called, Growth, Output, TextItem
from gateway.triton_client import Piece, Usage
from gateway.turns import Turns

encode = msgspec.json.encode


class ResponseWriter:
    """One response: `take` or `events` of each piece in order, `finished`, and `closing`."""

    def __init__(self, message: ResponseRequest, turns: Turns, reader: PartReader | None = None) -> None:
        """`reader`: of the answer; None: it is one message."""
        self.id = new_id("resp")
        self._message, self._turns = message, turns
        self._created = int(time.time())
        self._sequence_number = 0
        self._output = Output(reader)
        self._usage = Usage()
        self._is_cut = False

    def take(self, piece: Piece) -> list[Growth | Called]:
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
        before = self._output.open_item()
        for new in self.take(piece):
            is_same = isinstance(new, Growth) and new.item is before
            if before is not None and not is_same:
                events.append(await self._ended(before))
            if isinstance(new, Growth):
                events += self._growth(new)
                before = new.item
            else:
                events += self._call(new)
                before = None
        return b"".join(events)

    def _growth(self, new: Growth) -> Iterator[bytes]:
        where = new.item.where()
        if new.is_new:
            item = new.item.item("in_progress")
            yield self._event("response.output_item.added", output_index=new.item.place, item=item)
            yield self._event("response.content_part.added", **where, part=new.item.part("", []))
        if new.text or new.logprobs:
            values: dict[str, Any] = {"delta": new.text}
            if not new.item.is_reasoning:
                values["logprobs"] = columns_of(new.logprobs, chat_columns)["content"]
            yield self._event(f"response.{new.item.kind}.delta", **where, **values)

    def _call(self, called: Called) -> Iterator[bytes]:
        place, item = called.place, called.item
        where, arguments = {"item_id": item["id"], "output_index": place}, item["arguments"]
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=place, item=item)

    async def _ended(self, text: TextItem, status: str = "completed") -> bytes:
        """The last events of an item of text."""
        part = await self._part(text)
        values = {name: part[name] for name in ("text", "logprobs") if name in part}
        where, item = text.where(), text.item(status)
        return b"".join(
            (
                self._event(f"response.{text.kind}.done", **where, **values),
                self._event("response.content_part.done", **where, part=part),
                self._event("response.output_item.done", output_index=text.place, item=item),
            )
        )

    async def _part(self, text: TextItem) -> Item:
        """The whole text of an item that has ended."""
        if not text.content:
            logprobs = (await encoded(text.logprobs, chat_columns, self._turns))["content"]
            text.content = [text.part(text.text, logprobs)]
        return text.content[0]

    async def finished(self) -> dict[str, Any]:
        """The Response object of a complete answer, or of one that was cut at its limit."""
        status = "incomplete" if self._is_cut else "completed"
        last = self._output.open_item()
        output = []
        for entry in self._output.entries:
            if isinstance(entry, TextItem):
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
        last = self._output.open_item()
        ends = b"" if last is None else await self._ended(last, body["status"])
        return ends + self._event(f"response.{body['status']}", response=body)

    def items(self) -> tuple[Item, ...]:
        """The output of a complete answer without log-probabilities, for later turns."""
        return tuple(entry.kept() if isinstance(entry, TextItem) else entry.item for entry in self._output.entries)

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
            "temperature": message.temperature,
            "text": {"format": shown_format(None if message.text is None else message.text.format)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in message.tools or []],
            "top_logprobs": message.top_logprobs or 0,
            "top_p": message.top_p,
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
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
