"""Large replies are encoded and written piece by piece, so that others use the event loop in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from gateway import triton_client
from gateway.answers import BLOCK, Outlet
from gateway.choices import Reply, total_usage
from gateway.chunks import ChatChunks, Head, chat_body, completion_body
from gateway.logprobs import SLICE, TextColumns, chat_columns, encoded
from gateway.messages import StreamOptions
from gateway.parts import PlainReader
from gateway.tool_formats.reader import CallReader
from gateway.tool_formats.table import TOOL_FORMATS
from gateway.triton_client import Job, Piece, TritonLink, Usage
from gateway.turns import Turns
from tests.gateway.fake_triton import FakeTriton, logprob

MANY = 20 * SLICE + 1
WORDS = ["a", " wörld", " 🌍", "!"]


def tokens(count: int) -> list[dict[str, Any]]:
    words = [WORDS[i % len(WORDS)] for i in range(count)]
    return [{**logprob(word, -0.5 - i), "top": [logprob(word, -0.5), logprob("b", -2)]} for i, word in enumerate(words)]


def raws(values: list[Any]) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


def iterations(work: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """How often something else that is always ready ran meanwhile, and the result."""

    async def measured() -> tuple[int, Any]:
        count = 0

        async def other() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        ticking = asyncio.ensure_future(other())
        result = await work()
        ticking.cancel()
        return count, result

    return asyncio.run(measured())


def test_log_probs_are_encoded_a_slice_in_a_turn() -> None:
    values = tokens(MANY)
    count, found = iterations(lambda: encoded(raws(values), chat_columns, Turns()))
    assert count >= MANY // SLICE
    shown = [{"token": v["token"], "logprob": v["logprob"], "bytes": v["bytes"]} for v in values]
    assert [
        {k: v for k, v in entry.items() if k != "top_logprobs"} for entry in msgspec.json.decode(found["content"])
    ] == shown
    assert msgspec.json.decode(found["content"])[0]["top_logprobs"][1] == {"token": "b", "logprob": -2.0, "bytes": [98]}


def test_the_offsets_of_a_completion_run_on_from_slice_to_slice() -> None:
    found = asyncio.run(encoded(raws(tokens(MANY)), TextColumns(), Turns()))
    words = msgspec.json.decode(found["tokens"])
    assert msgspec.json.decode(found["text_offset"]) == [len("".join(words[:i])) for i in range(MANY)]
    assert {len(msgspec.json.decode(column)) for column in found.values()} == {MANY}


def test_offsets_count_characters_that_several_tokens_share_once() -> None:
    """Its first token shows what it begins, an offset behind it stays until the last one is there."""
    earth = "🌍".encode()
    parts = [b"a", earth[:1], earth[1:3], earth[3:], b"b"]
    values = [{"token": "?", "logprob": -1.0, "bytes": list(part)} for part in parts]
    found = asyncio.run(encoded(raws(values), TextColumns(), Turns()))
    assert msgspec.json.decode(found["text_offset"]) == [0, 1, 1, 1, 2]


def told(index: int, text: str, usage: Usage | None = None) -> Piece:
    return Piece(index, text, [1], None, None if usage is None else "stop", None, usage)


def test_streamed_choices_read_their_own_calls_and_have_their_own_usage() -> None:
    """The pieces of two choices take turns."""
    readers = [CallReader(TOOL_FORMATS["hermes"].format, {}) for _ in range(2)]
    chunks = ChatChunks(Head("id", "x", "m"), 2, StreamOptions(include_usage=True), readers=readers)
    calls = [
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    ]
    events: list[bytes] = []
    for start in range(0, len(calls[0]), 9):
        for index, call in enumerate(calls):
            events += chunks.of(index, told(index, call[start : start + 9]))
    for index in range(2):
        events += chunks.of(index, told(index, "", Usage(7, 10 * (index + 1), 3 - index)))
    events += chunks.last()
    found = [json.loads(event.removeprefix(b"data: ")) for event in events]
    names = {
        choice["index"]: call["function"]["name"]
        for event in found
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
    }
    assert names == {0: "f", 1: "g"}
    assert found[-1]["usage"]["completion_tokens"] == 30 and found[-1]["usage"]["prompt_tokens"] == 7


def test_usage_adds_each_prompt_once_and_each_reply() -> None:
    usages = [Usage(7, 1, 3), Usage(7, 2, 6), Usage(20, 4, 16), Usage(20, 8, 12, 100)]
    usage = total_usage(usages, 2)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (27, 115, 142)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3 + 12}


def test_without_tokens_the_lists_are_empty() -> None:
    found = asyncio.run(encoded([], TextColumns(), Turns()))
    assert {name: msgspec.json.decode(column) for name, column in found.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), []
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda *given: chat_body(*given, [PlainReader()] * 3),
        lambda *given: completion_body(*given, 1),
    ],
    ids=["chat", "completions"],
)
def test_each_choice_of_a_reply_starts_from_its_own_beginning(body: Callable[..., Any]) -> None:
    replies = []
    for _ in range(3):
        reply = Reply()
        for value in tokens(2):
            piece = Piece(0, value["token"], [1], raws([value]), "stop", None, Usage(7, 2))
            reply.add(piece)
        replies.append(reply)
    count, parts = iterations(lambda: body(Head("id", "x", "m"), replies, Turns()))
    choices = json.loads(b"".join(parts))["choices"]
    assert count >= 2 and [choice["index"] for choice in choices] == [0, 1, 2]
    text = "".join(value["token"] for value in tokens(2))
    assert [choice.get("text") or choice["message"]["content"] for choice in choices] == [text] * 3
    assert choices[0]["logprobs"] == choices[1]["logprobs"] == choices[2]["logprobs"]
    if "text_offset" in choices[0]["logprobs"]:
        assert choices[2]["logprobs"]["text_offset"] == [0, 1]


def test_whoever_waits_gets_its_turn_in_order_and_one_a_time() -> None:
    async def work() -> list[int]:
        turns, order = Turns(), []

        async def one(index: int) -> None:
            for _ in range(3):
                await turns.next()
                order.append(index)

        await asyncio.gather(*(one(index) for index in range(4)))
        return order

    count, order = iterations(work)
    assert order == [0, 1, 2, 3] * 3 and count >= len(order)


@pytest.mark.parametrize("sizes", [[0], [1], [BLOCK], [BLOCK + 1], [10] * 20_000, [5 * BLOCK, 3, 2 * BLOCK]])
def test_a_response_is_written_in_blocks_with_turns_between(sizes: list[int]) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    parts = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    count, _ = iterations(lambda: Outlet(send).json(parts))
    blocks = sent[1:]
    assert b"".join(message["body"] for message in blocks) == b"".join(parts)
    assert dict(sent[0]["headers"])[b"content-length"] == str(sum(sizes)).encode()
    assert max(len(message["body"]) for message in blocks) <= BLOCK and count >= len(blocks) - 2
    assert [message["more_body"] for message in blocks] == [True] * (len(blocks) - 1) + [False]


def test_the_elements_of_a_large_response_of_the_model_are_read_one_in_a_turn(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    class Counted(Turns):
        async def next(self) -> None:
            taken.append(1)
            await super().next()

    async def read(limit: int) -> int:
        monkeypatch.setattr(triton_client, "LARGE_RESPONSE", limit)
        taken.clear()
        link = TritonLink(triton.url, "everbatch", 30, Counted())
        async with aclosing(link.stream(Job({"prompt": "a", "n": 32}, "id", "", 32))) as source:
            found = [piece async for piece in source]
        await link.close()
        return len(found) * 1000 + len(taken)

    assert asyncio.run(read(1000)) == 32_032
    assert asyncio.run(read(1 << 20)) == 32_000
