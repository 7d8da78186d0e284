"""A stream tells what the whole answer tells: on each wire, of each choice, whatever the pieces in which the answer comes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest

from gateway.anthropic_answers import MessageWriter
from gateway.anthropic_messages import MessagesRequest
from gateway.choices import Reply
from gateway.chunks import ChatChunks, Head, chat_body
from gateway.messages import StreamOptions
from gateway.parts import PartReader
from gateway.request_context import RequestContext
from gateway.response_events import ResponseWriter
from gateway.response_messages import ResponseRequest
from gateway.tool_formats.harmony import HarmonyReader
from gateway.triton_client import Piece, Usage
from gateway.turns import Turns
from tests.gateway.test_answer_readers import HARMONY, thinking

ADD, X = (f'<tool_call>{{"name": "{name}", "arguments": {{"text": "{name}"}}}}</tool_call>' for name in ("add", "x"))
CALL = '<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{{"text": "{0}"}}<|call|><|start|>assistant'
ANSWERS: dict[str, tuple[Callable[[], PartReader], str]] = {
    "text": (thinking, "one two\n\nthree"),
    "reasoning": (thinking, "<think>why\nnot</think>\n\nBecause."),
    "reasoning that is cut off": (thinking, "<think>why"),
    "a call": (thinking, ADD),
    "two calls": (thinking, f"{ADD}\n{X}"),
    "calls between all else": (thinking, f"<think>why</think>Let me see.\n{ADD}\n{X} And {ADD}{X}then.\n"),
    "channels": (HarmonyReader, HARMONY),
    "calls in channels": (HarmonyReader, CALL.format("a") + CALL.format("b") + "<|channel|>final<|message|>Done"),
    "nothing": (thinking, ""),
}


def splits(text: str) -> Iterator[list[str]]:
    for size in (len(text), 1, 2, 5, 13, 40):
        yield [text[i : i + size] for i in range(0, len(text), size or 1)]


def pieces_of(split: Sequence[str], end_is_apart: bool, index: int = 0) -> list[Piece]:
    texts = [*split, ""] if end_is_apart or not split else list(split)
    pieces = [Piece(index, text, [number]) for number, text in enumerate(texts)]
    pieces[-1].finish_reason, pieces[-1].usage = "stop", Usage(7 + index, len(texts), 3)
    return pieces


def all_pieces(text: str) -> Iterator[list[Piece]]:
    for split in splits(text):
        for end_is_apart in (False, True):
            yield pieces_of(split, end_is_apart)


def told(data: bytes) -> list[Any]:
    """The events of a stream."""
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


def without_ids(value: Any) -> Any:
    """The same with the random parts of ids replaced by numbers, in the order in which they first occur."""
    numbers: dict[str, str] = {}
    name: Callable[[re.Match[str]], str] = lambda found: numbers.setdefault(found[0], f"{found[1]}_{len(numbers)}")
    return json.loads(re.sub(r"(call|fc|msg|rs|toolu)_[0-9a-f]{8,}", name, msgspec.json.encode(value).decode()))


@pytest.mark.parametrize("second", ["text", "calls between all else"])
@pytest.mark.parametrize("first", ANSWERS)
def test_chunks_of_choices_side_by_side_add_up_to_the_whole_answer(first: str, second: str) -> None:
    head, answers = Head("id", "chat.completion.chunk", "m"), [ANSWERS[first], ANSWERS[second]]
    replies = [Reply(), Reply()]
    for index, (reply, (_, text)) in enumerate(zip(replies, answers)):
        reply.add(pieces_of([text], False, index)[0])
    whole = json.loads(b"".join(asyncio.run(chat_body(head, replies, Turns(), [make() for make, _ in answers]))))
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    for split in zip(*(splits(text) for _, text in answers)):
        chunks = ChatChunks(head, 2, options, [make() for make, _ in answers])
        queues = [pieces_of(each, True, index) for index, each in enumerate(split)]
        data = b""
        for turn in range(max(map(len, queues))):
            for index, queue in enumerate(queues):
                data += b"".join(event for piece in queue[turn : turn + 1] for event in chunks.of(index, piece))
        messages, reasons = folded(told(data), [len(queue) for queue in queues])
        assert [without_ids(each) for each in messages] == [
            without_ids(
                {name: each["message"].get(name) or None for name in ("content", "reasoning_content", "tool_calls")}
            )
            for each in whole["choices"]
        ]
        assert reasons == [each["finish_reason"] for each in whole["choices"]]
        (last,) = [json.loads(event[6:]) for event in chunks.last()]
        assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert last["usage"]["completion_tokens"] == sum(map(len, queues))


def folded(events: list[Any], counts: list[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """The message and the finish_reason of each of two choices. `counts`: of the tokens of each, one in a piece."""
    found: list[dict[str, Any]] = [{}, {}]
    reasons, so_far = ["", ""], [0, 0]
    for event in events:
        (choice,) = event["choices"]
        index, delta = choice["index"], choice["delta"]
        message, is_first = found[index], not so_far[index]
        assert is_first == ("role" in delta) and not reasons[index]
        tokens = event["usage"]["completion_tokens"]
        assert 0 < tokens <= counts[index] and tokens >= so_far[index], "of this choice alone, and it grows"
        so_far[index] = tokens
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append(call)
            assert call.pop("index") == len(message["tool_calls"]) - 1
        reasons[index] = choice["finish_reason"] or ""
    assert so_far == counts
    names = ("content", "reasoning_content", "tool_calls")
    return [{name: message.get(name) or None for name in names} for message in found], reasons


@pytest.mark.parametrize("name", ANSWERS)
def test_the_events_of_a_response_add_up_to_its_output(name: str) -> None:
    make, text = ANSWERS[name]
    message = ResponseRequest(model="m", input="x")

    async def whole() -> list[Any]:
        writer = ResponseWriter(message, Turns(), make())
        writer.take(pieces_of([text], False)[0])
        output: list[Any] = (await writer.finished())["output"]
        return output

    async def streamed(pieces: list[Piece]) -> tuple[list[Any], dict[str, Any]]:
        writer = ResponseWriter(message, Turns(), make())
        data = b"".join([await writer.events(piece) for piece in pieces])
        body = await writer.finished()
        return told(data + await writer.closing(body)), json.loads(msgspec.json.encode(body))

    expected = without_ids(asyncio.run(whole()))
    for pieces in all_pieces(text):
        events, body = asyncio.run(streamed(pieces))
        assert without_ids(body["output"]) == expected
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items = [event for event in events if event["type"].startswith("response.output_item")]
        ends = [(event["output_index"], event["type"].rpartition(".")[2]) for event in items]
        assert ends == [(index, end) for index in range(len(expected)) for end in ("added", "done")]
        assert [event["item"] for event in items if event["type"].endswith("done")] == body["output"]
        for index, item in enumerate(body["output"]):
            deltas = [each["delta"] for each in events if each.get("output_index") == index and "delta" in each]
            assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


@pytest.mark.parametrize("name", ANSWERS)
def test_the_events_of_a_message_add_up_to_its_blocks(name: str) -> None:
    make, text = ANSWERS[name]
    message = MessagesRequest(model="m", max_tokens=99, messages=[{"role": "user", "content": "x"}])
    context = cast(RequestContext, None)  # for failures
    writer = MessageWriter(message, make(), context)
    writer.take(pieces_of([text], False)[0])
    whole = json.loads(writer.body())
    for pieces in all_pieces(text):
        writer = MessageWriter(message, make(), context)
        events = told(b"".join(map(writer.events, pieces)) + writer.closing())
        blocks: list[Any] = []
        is_open = False
        for event in events:
            if event["type"] == "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append(event["content_block"])
                is_open, parts = True, list[str]()
            elif event["type"] == "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                parts.append(next(value for key, value in event["delta"].items() if key != "type"))
            elif event["type"] == "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open, kind = False, blocks[-1]["type"]
                joined = "".join(parts)
                blocks[-1] |= {"input": json.loads(joined)} if kind == "tool_use" else {kind: joined}
        assert not is_open and without_ids(blocks) == without_ids(whole["content"])
        (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
        assert end == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
