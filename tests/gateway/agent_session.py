"""A recorded session of a coding agent, request by request, and the client that plays it again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import anthropic
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent

SESSION: Any = json.loads(Path(__file__).with_name("agent_session.json").read_text())
HEADERS: dict[str, str] = SESSION["headers"]
MARK = {"type": "ephemeral"}


class Exchange(NamedTuple):
    request: Any
    said: str  # the text of the model
    answer: Any  # the blocks that the client gets


def side_exchanges() -> list[Exchange]:
    return [Exchange(**one) for one in SESSION["side_requests"]]


def agent_exchanges() -> Iterator[Exchange]:
    """Each request has all turns before it."""
    history: list[Any] = []
    for number, turn in enumerate(SESSION["agent"]["turns"]):
        history.append({"role": "user", "content": turn["user"]})
        request = copy.deepcopy({**SESSION["agent"]["request"], "messages": history})
        request["messages"][-1]["content"][-1]["cache_control"] = MARK
        request["system"][0]["text"] += f" cch={number:05x};"
        yield Exchange(request, turn["said"], turn["answer"])
        history.append({"role": "assistant", "content": turn["answer"]})


def replay(claude: anthropic.Anthropic, request: Any) -> Message:
    """Send a request as it was recorded; the answer as the client puts it together."""
    options: Any = {"body": request, "options": {"headers": HEADERS}}
    if not request.get("stream"):
        return claude.post("/v1/messages?beta=true", cast_to=Message, **options)
    kind = anthropic.Stream[RawMessageStreamEvent]
    events = claude.post(
        "/v1/messages?beta=true", cast_to=cast(Any, RawMessageStreamEvent), stream=True, stream_cls=kind, **options
    )
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in cast(Any, events):
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    return cast(Message, message)


def shown(blocks: Any) -> list[Any]:
    """The blocks without what a server chooses: ids and signatures."""
    given = [block if isinstance(block, dict) else block.to_dict() for block in blocks]
    names = ("type", "text", "thinking", "name", "input")
    return [{name: block[name] for name in names if block.get(name) is not None} for block in given]
