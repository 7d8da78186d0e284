"""Replies of the Triton model in the shapes of chat completions and completions, whole and as streamed chunks.

What is the same in every chunk of a choice is encoded once; of a token only its text is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.choices import Reply, total_usage
from gateway.logprobs import SLICE, TextColumns, chat_columns, columns_of, encoded
from gateway.tools import CallReader, read_calls
from gateway.triton_client import Piece, Usage
from gateway.turns import Turns

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


@dataclass(frozen=True)
class Head:
    """The fields with which every chunk of a request begins."""

    id: str
    object: str
    model: str
    tells_tier: bool = False  # the answer names the tier: the client had asked for one
    created: int = field(default_factory=lambda: int(time.time()))

    def values(self) -> dict[str, Any]:
        tier = {"service_tier": "default"} if self.tells_tier else {}
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model, **tier}


async def chat_logprobs(tokens: list[msgspec.Raw] | None, turns: Turns) -> dict[str, Any] | None:
    return None if tokens is None else {**await encoded(tokens, chat_columns, turns), "refusal": None}


async def chat_body(head: Head, replies: list[Reply], turns: Turns, with_calls: bool = False) -> list[bytes]:
    """The parts of the JSON. `with_calls`: the model may call tools."""
    choices = []
    for index, reply in enumerate(replies):
        content, calls = read_calls(reply.text) if with_calls else (reply.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.body() for call in calls]}
        reason = _reason(reply.finish_reason, len(calls))
        logprobs = await chat_logprobs(reply.logprobs, turns)
        choices.append(encode({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}))
    return _body(head, choices, total_usage(usages_of(replies), len(replies)))


async def completion_body(head: Head, replies: list[Reply], turns: Turns, choices_per_prompt: int) -> list[bytes]:
    """The parts of the JSON."""
    choices = []
    for index, reply in enumerate(replies):
        logprobs = None if reply.logprobs is None else await encoded(reply.logprobs, TextColumns(), turns)
        choice = {"index": index, "text": reply.text, "logprobs": logprobs, "finish_reason": reply.finish_reason}
        choices.append(encode(choice))
    return _body(head, choices, total_usage(usages_of(replies), choices_per_prompt))


def _body(head: Head, choices: list[bytes], usage: dict[str, object]) -> list[bytes]:
    separated = [part for choice in choices for part in (b",", choice)][1:]
    return [encode(head.values())[:-1] + b',"choices":[', *separated, b'],"usage":' + encode(usage) + b"}"]


def _reason(reason: str | None, num_calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and num_calls else reason


def usages_of(replies: list[Reply]) -> list[Usage]:
    return [reply.usage for reply in replies]


class Chunks:
    """The events of one streamed request, each to be sent by itself. A subclass knows the shape of its choices."""

    def __init__(self, head: Head, choices: int, choices_per_prompt: int, include_usage: bool) -> None:
        self._head, self._per_prompt, self._include_usage = head, choices_per_prompt, include_usage
        self._usages = [Usage() for _ in range(choices)]
        opening = b"data: " + encode(head.values())[:-1] + b',"choices":[{"index":'
        self._openings = [opening + str(index).encode() + b"," for index in range(choices)]
        self._closing = (b'}],"usage":null}' if include_usage else b"}]}") + b"\n\n"

    def of(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The events for one piece, each made when it is asked for; none when it has nothing that a client sees."""
        if piece.usage is not None:
            self._usages[index] = piece.usage
        for part in self._body(index, piece):
            yield self._openings[index] + part + self._closing
        if piece.finish_reason is not None:
            yield self._openings[index] + self._end(index, piece.finish_reason) + self._closing

    def last(self) -> list[bytes]:
        """The events behind those of all choices, but for DONE."""
        if not self._include_usage:
            return []
        usage = total_usage(self._usages, self._per_prompt)
        return [b"data: " + encode({**self._head.values(), "choices": [], "usage": usage}) + b"\n\n"]

    def _body(self, index: int, piece: Piece) -> Iterable[bytes]:
        raise NotImplementedError

    def _end(self, index: int, reason: str) -> bytes:
        raise NotImplementedError


class ChatChunks(Chunks):
    def __init__(self, head: Head, choices: int, include_usage: bool, with_calls: bool = False) -> None:
        super().__init__(head, choices, choices, include_usage)
        self._greeted = [False] * choices
        self._readers = [CallReader() for _ in range(choices)] if with_calls else []

    def _body(self, index: int, piece: Piece) -> list[bytes]:
        parts = []
        if not self._greeted[index]:
            self._greeted[index] = True
            parts.append(b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')
        if self._readers:
            return parts + _with_calls(self._readers[index], piece)
        if piece.text or piece.logprobs:
            parts.append(_delta({"content": piece.text}, piece.logprobs))
        return parts

    def _end(self, index: int, reason: str) -> bytes:
        told = _reason(reason, self._readers[index].num_calls if self._readers else 0)
        return b'"delta":{},"logprobs":null,"finish_reason":' + encode(told)


def _with_calls(reader: CallReader, piece: Piece) -> list[bytes]:
    """Each call is one delta. Log-probabilities go with the first one of the piece, or with an empty text."""
    number = reader.num_calls
    found = reader.push(piece.text)
    rest = "" if piece.finish_reason is None else reader.flush()
    deltas: list[dict[str, Any]] = []
    for part in [*found, rest] if rest else found:
        if isinstance(part, str):
            deltas.append({"content": part})
        else:
            deltas.append({"tool_calls": [{"index": number, **part.body()}]})
            number += 1
    if not deltas and piece.logprobs:
        deltas.append({"content": ""})
    return [_delta(delta, None if i else piece.logprobs) for i, delta in enumerate(deltas)]


def _delta(delta: dict[str, Any], tokens: list[msgspec.Raw] | None) -> bytes:
    logprobs = b"null" if tokens is None else encode({**columns_of(tokens, chat_columns), "refusal": None})
    return b'"delta":' + encode(delta) + b',"logprobs":' + logprobs + b',"finish_reason":null'


class CompletionChunks(Chunks):
    def __init__(self, head: Head, choices: int, choices_per_prompt: int, include_usage: bool) -> None:
        super().__init__(head, choices, choices_per_prompt, include_usage)
        self._logprobs = [TextColumns() for _ in range(choices)]

    def _body(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The tokens of a long prompt come in slices, of which the first one has the text."""
        tokens = piece.shown_logprobs
        if not (piece.text or tokens):
            return
        yield self._part(index, piece.text, None if tokens is None else tokens[:SLICE])
        for start in range(SLICE, len(tokens or []), SLICE):
            yield self._part(index, "", (tokens or [])[start : start + SLICE])

    def _part(self, index: int, text: str, tokens: list[msgspec.Raw] | None) -> bytes:
        logprobs = b"null" if tokens is None else encode(columns_of(tokens, self._logprobs[index]))
        return b'"text":' + encode(text) + b',"logprobs":' + logprobs + b',"finish_reason":null'

    def _end(self, index: int, reason: str) -> bytes:
        return b'"text":"","logprobs":null,"finish_reason":' + encode(reason)
