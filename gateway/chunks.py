"""Replies of the Triton model in the shapes of chat completions and completions, whole and as streamed chunks.

What is the same in every chunk of a choice is encoded once; of a token only its text is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.choices import Reply, total_usage
from gateway.logprobs import SLICE, TextColumns, chat_columns, columns_of, encoded, prompt_scores
from gateway.messages import StreamOptions
from gateway.parts import Call, PartReader, Reasoning, whole_answer
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
    tells_ids: bool = False  # the answer has the ids of its tokens and of the prompt's
    scores_prompt: bool = False  # the answer has the log-probabilities of the prompt's tokens
    created: int = field(default_factory=lambda: int(time.time()))

    def values(self) -> dict[str, Any]:
        tier = {"service_tier": "default"} if self.tells_tier else {}
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model, **tier}


async def chat_logprobs(tokens: list[msgspec.Raw] | None, turns: Turns) -> dict[str, Any] | None:
    return None if tokens is None else {**await encoded(tokens, chat_columns, turns), "refusal": None}


async def chat_body(head: Head, replies: list[Reply], turns: Turns, readers: Sequence[PartReader]) -> list[bytes]:
    """The parts of the JSON. `readers`: one for each reply."""
    choices = []
    for index, (reply, reader) in enumerate(zip(replies, readers)):
        content, reasoning, calls = whole_answer([*reader.push(reply.text), *reader.flush()])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **_reasoned(reasoning)}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.body() for call in calls]}
        reason = _reason(reply.finish_reason, len(calls))
        logprobs = await chat_logprobs(reply.logprobs, turns)
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        choices.append(encode(choice | ({"token_ids": reply.token_ids} if head.tells_ids else {})))
    prompt: dict[str, Any] = {"prompt_token_ids": replies[0].prompt_token_ids} if head.tells_ids else {}
    prompt |= await _of_prompt(head, replies[0], turns)
    return _body(head, choices, total_usage(usages_of(replies), len(replies)), prompt)


async def _of_prompt(head: Head, reply: Reply, turns: Turns) -> dict[str, Any]:
    """The log-probabilities of the prompt's tokens, where the answer tells them."""
    if not head.scores_prompt or reply.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": await prompt_scores(reply.prompt_logprobs, turns)}


def _reasoned(text: str) -> dict[str, str]:
    """The reasoning under both names that clients look for; nothing where there is none."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


async def completion_body(head: Head, replies: list[Reply], turns: Turns, choices_per_prompt: int) -> list[bytes]:
    """The parts of the JSON."""
    choices = []
    for index, reply in enumerate(replies):
        logprobs = None if reply.logprobs is None else await encoded(reply.logprobs, TextColumns(), turns)
        choice = {"index": index, "text": reply.text, "logprobs": logprobs, "finish_reason": reply.finish_reason}
        ids = {"token_ids": reply.token_ids, "prompt_token_ids": reply.prompt_token_ids}
        choice |= (ids if head.tells_ids else {}) | await _of_prompt(head, reply, turns)
        choices.append(encode(choice))
    return _body(head, choices, total_usage(usages_of(replies), choices_per_prompt))


def _body(
    head: Head, choices: list[bytes], usage: dict[str, object], further: dict[str, Any] | None = None
) -> list[bytes]:
    separated = [part for choice in choices for part in (b",", choice)][1:]
    return [
        encode(head.values() | (further or {}))[:-1] + b',"choices":[',
        *separated,
        b'],"usage":' + encode(usage) + b"}",
    ]


def _reason(reason: str | None, num_calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and num_calls else reason


def usages_of(replies: list[Reply]) -> list[Usage]:
    return [reply.usage for reply in replies]


class _Ids:
    """The ids of a choice's tokens in its events. Each id is in one event: the first that is sent after the token has come."""

    def __init__(self, prompt_is_of_choice: bool) -> None:
        self._prompt_is_of_choice = prompt_is_of_choice
        self._untold: list[int] = []
        self._prompt: list[int] | None = None

    def take(self, piece: Piece) -> None:
        self._untold += piece.token_ids
        if piece.prompt is not None:
            self._prompt = piece.prompt.token_ids

    def fields(self) -> tuple[bytes, bytes]:
        """The fields that the next event gets: those of its choice, and those of the chunk around the choice."""
        told, self._untold = b'"token_ids":' + encode(self._untold) + b",", []
        if self._prompt is None:
            return told, b""
        prompt, self._prompt = b'"prompt_token_ids":' + encode(self._prompt), None
        return (told + prompt + b",", b"") if self._prompt_is_of_choice else (told, b"," + prompt)


class Chunks:
    """The events of one streamed request, each to be sent by itself. A subclass knows the shape of its choices, and whether the
    ids of the prompt belong to each of them or to the chunk.
    """

    prompt_is_of_choice: bool

    def __init__(self, head: Head, choices: int, choices_per_prompt: int, options: StreamOptions | None) -> None:
        """`options`: whether the last event has the usage of all choices, and each event that of its choice so far."""
        self._head, self._per_prompt = head, choices_per_prompt
        self._include_usage = include_usage = options is not None and bool(options.include_usage)
        self._tells_progress = options is not None and bool(options.continuous_usage_stats)
        self._usages = [Usage() for _ in range(choices)]
        opening = b"data: " + encode(head.values())[:-1] + b',"choices":[{"index":'
        self._openings = [opening + str(index).encode() + b"," for index in range(choices)]
        self._closing = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._ids = [_Ids(self.prompt_is_of_choice) for _ in range(choices)] if head.tells_ids else []

    def of(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The events for one piece, each made when it is asked for; none when it has nothing that a client sees."""
        if piece.usage is not None:
            self._usages[index] = piece.usage
        elif self._tells_progress:
            self._count(self._usages[index], piece)
        if self._ids:
            self._ids[index].take(piece)
        for part in self._body(index, piece):
            yield self._event(index, part)
        if piece.finish_reason is not None:
            yield self._event(index, self._end(index, piece.finish_reason))

    def _event(self, index: int, part: bytes) -> bytes:
        of_choice, of_chunk = self._ids[index].fields() if self._ids else (b"", b"")
        closing = self._closing
        if self._tells_progress:
            closing = b',"usage":' + encode(total_usage([self._usages[index]], 1)) + b"}\n\n"
        return self._openings[index] + of_choice + part + b"}]" + of_chunk + closing

    def _count(self, usage: Usage, piece: Piece) -> None:
        """Add a piece to the usage of its choice so far, which its last piece tells."""
        usage.completion_tokens += len(piece.token_ids)
        if piece.prompt is not None:
            usage.prompt_tokens, usage.cached_tokens = piece.prompt.prompt_tokens, piece.prompt.cached_tokens

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
    """`readers`: one for each choice."""

    prompt_is_of_choice = False

    def __init__(self, head: Head, choices: int, options: StreamOptions | None, readers: Sequence[PartReader]) -> None:
        super().__init__(head, choices, choices, options)
        self._greeted = [False] * choices
        self._readers = readers

    def _body(self, index: int, piece: Piece) -> list[bytes]:
        parts = []
        if not self._greeted[index]:
            self._greeted[index] = True
            parts.append(b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')
        return parts + _deltas(self._readers[index], piece)

    def _end(self, index: int, reason: str) -> bytes:
        told = _reason(reason, self._readers[index].num_calls)
        return b'"delta":{},"logprobs":null,"finish_reason":' + encode(told)


def _deltas(reader: PartReader, piece: Piece) -> list[bytes]:
    """Each call is one delta. Log-probabilities go with the first one of the piece, or with an empty text."""
    number = reader.num_calls
    found = reader.push(piece.text)
    if piece.finish_reason is not None:
        found = [*found, *reader.flush()]
    deltas: list[dict[str, Any]] = []
    for part in found:
        match part:
            case str():
                deltas.append({"content": part})
            case Reasoning():
                deltas.append(_reasoned(part.text))
            case Call():
                deltas.append({"tool_calls": [{"index": number, **part.body()}]})
                number += 1
    if not deltas and piece.logprobs:
        deltas.append({"content": ""})
    return [_delta(delta, None if i else piece.logprobs) for i, delta in enumerate(deltas)]


def _delta(delta: dict[str, Any], tokens: list[msgspec.Raw] | None) -> bytes:
    logprobs = b"null" if tokens is None else encode({**columns_of(tokens, chat_columns), "refusal": None})
    return b'"delta":' + encode(delta) + b',"logprobs":' + logprobs + b',"finish_reason":null'


class CompletionChunks(Chunks):
    prompt_is_of_choice = True

    def __init__(self, head: Head, choices: int, choices_per_prompt: int, options: StreamOptions | None) -> None:
        super().__init__(head, choices, choices_per_prompt, options)
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
