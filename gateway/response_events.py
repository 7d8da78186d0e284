"""The Response object of /v1/responses, and the events that tell how it grows."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from gateway.chunks import encode, token_logprob
from gateway.errors import GatewayError
from gateway.formats import shown_format
from gateway.response_messages import ResponseRequest
from gateway.triton_client import Piece, TokenLogProb, Usage


class ResponseWriter:
    """One response. `events` of each piece, in order, between `opening` and `closing`."""

    def __init__(self, message: ResponseRequest) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._message = message
        self._created = int(time.time())
        self._sequence_number = 0
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        place = encode({"type": "response.output_text.delta", **self._place})[:-1]
        self._delta_opening = b"event: response.output_text.delta\ndata: " + place + b',"delta":'

    def opening(self) -> bytes:
        response = self.body("in_progress")
        item = self._item("in_progress", [])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=part),
            )
        )

    def delta(self, piece: Piece) -> bytes:
        """The event for new text; none when there is none."""
        if not (piece.text or piece.logprobs):
            return b""
        logprobs = b"[]" if not piece.logprobs else encode(_logprobs(piece.logprobs))
        number = str(self._next()).encode()
        text = self._delta_opening + encode(piece.text)
        return text + b',"logprobs":' + logprobs + b',"sequence_number":' + number + b"}\n\n"

    def closing(self, body: dict[str, Any]) -> bytes:
        """The last events, `body` being what `finished` made."""
        item = body["output"][0]
        part = item["content"][0]
        values = {"text": part["text"], "logprobs": part["logprobs"]}
        return b"".join(
            (
                self._event("response.output_text.done", **self._place, **values),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{body['status']}", response=body),
            )
        )

    def failure(self, error: GatewayError) -> bytes:
        """The last event of a response that failed after it had begun."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = self.body("failed") | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=body)

    def finished(self, reply: Piece) -> dict[str, Any]:
        """The Response object of a complete reply, or of one that was cut at its limit."""
        cut = reply.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        logprobs = _logprobs(reply.logprobs or [])
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
        return self.body(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": [self._item(status, [part])],
            "usage": _usage(reply.usage or Usage()),
        }

    def body(self, status: str) -> dict[str, Any]:
        """The Response object without output."""
        message = self._message
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": message.instructions,
            "max_output_tokens": message.max_output_tokens,
            "metadata": message.metadata or {},
            "model": message.model,
            "output": [],
            "parallel_tool_calls": True if message.parallel_tool_calls is None else message.parallel_tool_calls,
            "previous_response_id": message.previous_response_id,
            "store": message.store is not False,
            "temperature": 1.0 if message.temperature is None else message.temperature,
            "text": {"format": shown_format(None if message.text is None else message.text.format)},
            "tool_choice": message.tool_choice or "auto",
            "tools": [],
            "top_logprobs": message.top_logprobs or 0,
            "top_p": 1.0 if message.top_p is None else message.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": message.user,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _event(self, kind: str, **values: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, **values, "sequence_number": self._next()})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _next(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _logprobs(tokens: list[TokenLogProb]) -> list[dict[str, Any]]:
    return [token_logprob(token) for token in tokens]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
