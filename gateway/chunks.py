"""Replies of the Triton model in the shapes of chat completions and completions, whole and as streamed chunks.

What is the same in every chunk of a choice is encoded once; of a token only its text is.
"""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.choices import total_usage
from gateway.tools import CallReader, read_calls
from gateway.triton_client import Piece, TokenLogProb, Usage

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


@dataclass(frozen=True)
class Head:
    """What every chunk of a request says first."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def values(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


def chat_logprobs(tokens: list[TokenLogProb] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [token_logprob(token) for token in tokens], "refusal": None}


def token_logprob(token: TokenLogProb) -> dict[str, Any]:
    """A token as chat completions and responses show it."""
    top = [{"token": other.token, "logprob": other.logprob, "bytes": other.bytes} for other in token.top]
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes, "top_logprobs": top}


class TextLogProbs:
    """The log-probabilities of one completion: four lists; offsets count characters from the text's beginning."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: list[TokenLogProb] | None) -> dict[str, Any] | None:
        """Of the tokens that follow those of the call before."""
        if tokens is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(token.bytes)))
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogProb) -> dict[str, float]:
    """The most likely tokens, and the chosen one where it is not among them."""
    return {**{other.token: other.logprob for other in token.top}, token.token: token.logprob}


def chat_body(head: Head, replies: list[Piece], with_calls: bool = False) -> dict[str, Any]:
    """`with_calls`: the model may call tools."""
    choices = []
    for index, reply in enumerate(replies):
        content, calls = read_calls(reply.text) if with_calls else (reply.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.body() for call in calls]}
        reason = _reason(reply.finish_reason, len(calls))
        logprobs = chat_logprobs(reply.logprobs)
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    return {**head.values(), "choices": choices, "usage": total_usage(usages_of(replies), len(replies))}


def completion_body(head: Head, replies: list[Piece], choices_per_prompt: int) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": reply.text,
            "logprobs": TextLogProbs().of(reply.logprobs),
            "finish_reason": reply.finish_reason,
        }
        for index, reply in enumerate(replies)
    ]
    return {**head.values(), "choices": choices, "usage": total_usage(usages_of(replies), choices_per_prompt)}


def _reason(reason: str | None, num_calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and num_calls else reason


def usages_of(replies: list[Piece]) -> list[Usage]:
    return [reply.usage or Usage() for reply in replies]


class Chunks:
    """The events of one streamed request, each to be sent by itself. A subclass knows the shape of its choices."""

    def __init__(self, head: Head, choices: int, choices_per_prompt: int, include_usage: bool) -> None:
        self._head, self._per_prompt, self._include_usage = head, choices_per_prompt, include_usage
        self._usages = [Usage() for _ in range(choices)]
        opening = b"data: " + encode(head.values())[:-1] + b',"choices":[{"index":'
        self._openings = [opening + str(index).encode() + b"," for index in range(choices)]
        self._closing = (b'}],"usage":null}' if include_usage else b"}]}") + b"\n\n"

    def of(self, index: int, piece: Piece) -> list[bytes]:
        """The events for one piece; none when it has nothing that a client sees."""
        if piece.usage is not None:
            self._usages[index] = piece.usage
        body = self._body(index, piece)
        ends = b"" if piece.finish_reason is None else self._end(index, piece.finish_reason)
        return [self._openings[index] + part + self._closing for part in (*body, ends) if part]

    def last(self) -> list[bytes]:
        """The events behind those of all choices, but for DONE."""
        if not self._include_usage:
            return []
        usage = total_usage(self._usages, self._per_prompt)
        return [b"data: " + encode({**self._head.values(), "choices": [], "usage": usage}) + b"\n\n"]

    def _body(self, index: int, piece: Piece) -> list[bytes]:
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


def _delta(delta: dict[str, Any], tokens: list[TokenLogProb] | None) -> bytes:
    logprobs = b"null" if tokens is None else encode(chat_logprobs(tokens))
    return b'"delta":' + encode(delta) + b',"logprobs":' + logprobs + b',"finish_reason":null'


class CompletionChunks(Chunks):
    def __init__(self, head: Head, choices: int, choices_per_prompt: int, include_usage: bool) -> None:
        super().__init__(head, choices, choices_per_prompt, include_usage)
        self._logprobs = [TextLogProbs() for _ in range(choices)]

    def _body(self, index: int, piece: Piece) -> list[bytes]:
        if not (piece.text or piece.logprobs):
            return []
        logprobs = b"null" if piece.logprobs is None else encode(self._logprobs[index].of(piece.logprobs))
        return [b'"text":' + encode(piece.text) + b',"logprobs":' + logprobs + b',"finish_reason":null']

    def _end(self, index: int, reason: str) -> bytes:
        return b'"text":"","logprobs":null,"finish_reason":' + encode(reason)
