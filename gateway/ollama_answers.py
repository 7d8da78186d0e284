"""Answers of /api/chat and /api/generate: lines of JSON, or one object.

Durations are in nanoseconds, as the endpoint sees them. `load_duration` is 0: models are loaded before the endpoint answers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.logprobs import chat_columns, columns_of
from gateway.ollama_messages import OllamaChat, OllamaRequest
from gateway.parts import Call, Part, PartReader, Reasoning
from gateway.stopwatch import Stopwatch
from gateway.triton_client import Piece


class OllamaWriter:
    """One answer: `line` of each piece, then `last`; or `take` of each, then `body`."""

    def __init__(self, message: OllamaRequest, reader: PartReader) -> None:
        self._model, self._is_chat, self._reader = message.model, isinstance(message, OllamaChat), reader
        self._watch = Stopwatch()
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[Call] = []
        self._logprobs: list[Any] = []
        self._finish_reason = ""

    def take(self, piece: Piece) -> None:
        self._watch.take(piece)
        self._finish_reason = piece.finish_reason or ""
        parts = self._reader.push(piece.text)
        for part in [*parts, *(self._reader.flush() if piece.finish_reason else [])]:
            self._add(part)
        if piece.logprobs:
            self._logprobs += columns_of(piece.logprobs, chat_columns)["content"]

    def _add(self, part: Part) -> None:
        match part:
            case str():
                self._content.append(part)
            case Reasoning():
                self._thinking.append(part.text)
            case Call():
                self._calls.append(part)

    def line(self, piece: Piece) -> bytes:
        """A line with all that the piece has added; empty where that is nothing."""
        self.take(piece)
        shown, has_any = self._shown(), bool(self._content or self._thinking or self._calls or self._logprobs)
        self._content, self._thinking, self._calls, self._logprobs = [], [], [], []
        return _line({**self._begin(), **shown, "done": False}) if has_any else b""

    def last(self) -> bytes:
        """The line behind all others."""
        return _line(self.body())

    def body(self) -> dict[str, Any]:
        """The whole answer; behind lines what is left of it, which is no text."""
        reason = "length" if self._finish_reason == "length" else "stop"
        return {**self._begin(), **self._shown(), "done": True, "done_reason": reason, **durations(self._watch)}

    def _begin(self) -> dict[str, Any]:
        return begun(self._model)

    def _shown(self) -> dict[str, Any]:
        content, thinking = "".join(self._content), "".join(self._thinking)
        thought = {"thinking": thinking} if thinking else {}
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        if not self._is_chat:
            return {"response": content, **thought, **logprobs}
        calls = [_call(call, number) for number, call in enumerate(self._calls)]
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": content, **thought, **called}, **logprobs}


def begun(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def loaded(message: OllamaRequest) -> dict[str, Any]:
    """The answer to a request without messages or prompt, by which clients have a model loaded."""
    text = {"message": {"role": "assistant", "content": ""}} if isinstance(message, OllamaChat) else {"response": ""}
    return {**begun(message.model), **text, "done": True, "done_reason": "load"}


def durations(watch: Stopwatch) -> dict[str, int]:
    usage = watch.usage
    return {
        "total_duration": _ns(watch.total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(watch.prompt_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(watch.output_s),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _call(call: Call, number: int) -> dict[str, Any]:
    function = {"index": number, "name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}
    return {"id": call.id, "function": function}


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
