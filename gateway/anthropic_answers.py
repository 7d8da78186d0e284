"""The Message object of /v1/messages, and the events that tell how it grows.

The usage divides the tokens of the prompt as Anthropic does, into three numbers that add up to it:

    cache_read_input_tokens        those whose KV was there before
    cache_creation_input_tokens    the others, which were computed and are cached now, where the request has a cache_control
    input_tokens                   the others, where it has none
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from gateway.anthropic_messages import MessagesRequest
from gateway.anthropic_turns import wants_caching
from gateway.errors import GatewayError
from gateway.items import new_id
from gateway.parts import Call, Part, PartReader, Reasoning
from gateway.request_context import RequestContext
from gateway.triton_client import Piece

encode = msgspec.json.encode
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass
class _Text:
    """A block of text or of reasoning, which grows until another block or the end comes."""

    kind: str  # text, thinking
    texts: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        return _text_block(self.kind, "".join(self.texts))


@dataclass
class _ToolUse:
    """A call. It is complete when it is published."""

    call: Call

    def block(self) -> dict[str, Any]:
        return self.opening() | {"input": msgspec.Raw(self.call.arguments.encode())}

    def opening(self) -> dict[str, Any]:
        call_id = "toolu_" + self.call.id.removeprefix("call_")
        return {"type": "tool_use", "id": call_id, "name": self.call.name, "input": {}}


class _Growth(NamedTuple):
    """Text that a part of the answer adds to a block."""

    place: int
    block: _Text | _ToolUse
    is_new: bool
    text: str


class MessageWriter:
    """One message: `take` or `events` of each piece in order, then `body` or `closing`."""

    def __init__(self, message: MessagesRequest, reader: PartReader, context: RequestContext) -> None:
        self.id = new_id("msg")
        self._message, self._reader, self._context = message, reader, context
        self._is_caching = wants_caching(message)
        self._hides_reasoning = message.thinking is not None and message.thinking.display == "omitted"
        self._blocks: list[_Text | _ToolUse] = []
        self._blank = (
            ""  # white space, which is held back: ahead of a call it is no part of the text, as in chat templates
        )
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._thinking_tokens = 0
        self._has_begun = False
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None

    def take(self, piece: Piece) -> list[_Growth]:
        """Take in a piece of the answer; returns what it adds."""
        self._count(piece)
        parts = self._reader.push(piece.text)
        parts += [] if piece.finish_reason is None else self._reader.flush()
        grown = [new for part in parts if (new := self._add(part)) is not None]
        last = self._blocks[-1] if self._blocks else None
        if piece.finish_reason is not None and self._blank and isinstance(last, _Text) and last.kind == "text":
            grown.append(self._grown("text", self._blank))
        return grown

    def _count(self, piece: Piece) -> None:
        if piece.prompt is not None:
            self._prompt_tokens, self._cached_tokens = piece.prompt.prompt_tokens, piece.prompt.cached_tokens
        self._output_tokens += len(piece.token_ids)
        if piece.usage is not None:
            self._prompt_tokens, self._cached_tokens = piece.usage.prompt_tokens, piece.usage.cached_tokens
            self._output_tokens, self._thinking_tokens = piece.usage.completion_tokens, piece.usage.reasoning_tokens
        self._finish_reason = piece.finish_reason
        self._stop_sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None

    def _add(self, part: Part) -> _Growth | None:
        match part:
            case Call():
                return self._new(_ToolUse(part), part.arguments)
            case Reasoning():
                return self._grown("thinking", "" if self._hides_reasoning else part.text)
            case str():
                text = self._blank + part
                kept = text.rstrip()
                self._blank = text[len(kept) :]
                return self._grown("text", kept, self._blank) if kept else None

    def _grown(self, kind: str, text: str, blank: str = "") -> _Growth:
        """Text goes to the last block if that is of its kind, else to a new one. `blank`: what is held back behind it."""
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Text) or last.kind != kind:
            growth = self._new(_Text(kind, [text]), text)
        else:
            last.texts.append(text)
            growth = _Growth(len(self._blocks) - 1, last, False, text)
        self._blank = blank
        return growth

    def _new(self, block: _Text | _ToolUse, text: str) -> _Growth:
        self._blank = ""
        self._blocks.append(block)
        return _Growth(len(self._blocks) - 1, block, True, text)

    def events(self, piece: Piece) -> bytes:
        """The events for a piece. The first one's are preceded by what opens the message."""
        grown = self.take(piece)
        events = [] if self._has_begun else [self._start(), PING]
        self._has_begun = True
        for new in grown:
            if new.is_new:
                events += [*_ended(new.place - 1), _started(new)]
            if new.text:
                delta = _delta(new.block, new.text)
                events.append(_event("content_block_delta", index=new.place, delta=delta))
        return b"".join(events)

    def _start(self) -> bytes:
        usage = self._usage() | {"output_tokens": 0, "service_tier": "standard"}
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=self._head() | begun)

    def closing(self) -> bytes:
        """The last events."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        ends = _ended(len(self._blocks) - 1)
        return b"".join([*ends, _event("message_delta", delta=delta, usage=self._usage()), _event("message_stop")])

    def body(self) -> bytes:
        """The JSON of the whole message."""
        content = [block.block() for block in self._blocks]
        usage = self._usage() | {"service_tier": "standard"}
        end = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence, "usage": usage}
        return encode({**self._head(), "content": content, **end})

    def failure(self, error: GatewayError) -> bytes:
        """The last event of a message that failed after it had begun."""
        _, body = self._context.refusal(error)
        return b"event: error\ndata: " + encode(body) + b"\n\n"

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._message.model}

    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            is_full = self._output_tokens < self._message.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.num_calls else "end_turn"

    def _usage(self) -> dict[str, Any]:
        computed = self._prompt_tokens - self._cached_tokens
        return {
            "input_tokens": 0 if self._is_caching else computed,
            "cache_creation_input_tokens": computed if self._is_caching else 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
        }


def _started(new: _Growth) -> bytes:
    opening = new.block.opening() if isinstance(new.block, _ToolUse) else _text_block(new.block.kind, "")
    return _event("content_block_start", index=new.place, content_block=opening)


def _ended(place: int) -> list[bytes]:
    """The event that ends a block; no event before the first block."""
    return [_event("content_block_stop", index=place)] if place >= 0 else []


def _text_block(kind: str, text: str) -> dict[str, Any]:
    """Reasoning is signed by nothing: no client looks at it, and it comes back as it was."""
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _delta(block: _Text | _ToolUse, text: str) -> dict[str, Any]:
    if isinstance(block, _ToolUse):
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": f"{block.kind}_delta", block.kind: text}


def _event(kind: str, **values: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **values}) + b"\n\n"
