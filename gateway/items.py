"""Items of /v1/responses and /v1/conversations: messages, calls of functions and their outputs, as the API shows them, and as the
turns that a chat template reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.errors import GatewayError
from gateway.images import Content, Picture, check_image_role, content_of, parts_of
from gateway.response_messages import (
    FunctionCallItem,
    FunctionOutputItem,
    InputImage,
    InputMessage,
    InputText,
    ReasoningItem,
)
from gateway.tools import called_function

Item = dict[str, Any]
AnyItem = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem
PLACE = "input"  # in errors about an image, which may be one of an earlier turn
MOST_LISTED, LISTED = 100, 20  # items of one page: at most, and unless asked for


def items_of(given: str | Sequence[AnyItem]) -> list[Item]:
    """The items that a client sends, each with an id."""
    if isinstance(given, str):
        return [message_item("user", given)]
    return [_item(one) for one in given]


def _item(given: AnyItem) -> Item:
    match given:
        case InputMessage():
            return message_item(given.role, _content(given.content, given.role), given.id)
        case FunctionCallItem():
            return call_item(given.call_id, given.name, given.arguments, given.id)
        case FunctionOutputItem():
            return output_item(given.call_id, _content(given.output, "tool"), given.id)
        case ReasoningItem():
            return reasoning_item("".join(part.text for part in given.content or []), given.id)


def _content(given: str | Sequence[InputText | InputImage], role: str) -> Content:
    """Raises GatewayError for an image in a message that may have none."""
    if isinstance(given, str):
        return given
    parts: list[str | Picture] = []
    for part in given:
        if isinstance(part, InputImage):
            check_image_role(role, PLACE)
            parts.append(Picture(PLACE, part.image_url))
        else:
            parts.append(part.text)
    return content_of(parts)


def message_item(role: str, content: Content, item_id: str | None = None) -> Item:
    own = {"id": item_id or new_id("msg"), "type": "message", "status": "completed"}
    if role != "assistant":
        return {**own, "role": role, "content": _shown(content)}
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {**own, "role": role, "content": [part]}


def _shown(content: Content) -> list[Item]:
    """The parts of an item."""
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": part.url, "file_id": None, "detail": "auto"}
        for part in parts_of(content)
    ]


def _of_turn(parts: Sequence[Item]) -> Content:
    """The content of a turn from the parts of an item."""
    return content_of(
        Picture(PLACE, part["image_url"]) if part["type"] == "input_image" else part["text"] for part in parts
    )


def call_item(call_id: str, name: str, arguments: str, item_id: str | None = None, status: str = "completed") -> Item:
    own = {"id": item_id or new_id("fc"), "type": "function_call", "status": status}
    return {**own, "call_id": call_id, "name": name, "arguments": arguments}


def output_item(call_id: str, output: Content, item_id: str | None = None) -> Item:
    """The result of a call."""
    output = output if isinstance(output, str) else _shown(output)
    own = {"id": item_id or new_id("fco"), "type": "function_call_output", "status": "completed"}
    return {**own, "call_id": call_id, "output": output}


def reasoning_item(text: str, item_id: str | None = None) -> Item:
    own: Item = {"id": item_id or new_id("rs"), "type": "reasoning", "status": "completed", "summary": []}
    return {**own, "content": [{"type": "reasoning_text", "text": text}]}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def turns_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The turns of a chat: calls belong to the answer that they stand behind, and make one where there is none. Reasoning belongs
    to the answer ahead of which it stands.
    """
    turns: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        if item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item["content"])
            continue
        if item["type"] == "function_call":
            if reasoning or not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            call = called_function(item["call_id"], item["name"], item["arguments"])
            turns[-1].setdefault("tool_calls", []).append(call)
        elif item["type"] == "function_call_output":
            output = item["output"] if isinstance(item["output"], str) else _of_turn(item["output"])
            turns.append({"role": "tool", "content": output, "tool_call_id": item["call_id"]})
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            turns.append({"role": role, "content": _of_turn(item["content"])})
        if reasoning and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return turns


def listed(items: Sequence[Item], limit: str, order: str, after: str, most: int = MOST_LISTED) -> dict[str, Any]:
    """One page of items, the newest first unless `order` says asc. Raises GatewayError for what is asked wrongly."""
    if order not in ("asc", "desc"):
        raise GatewayError(400, f"order is {order[:40]!r}; it is asc or desc", "order", "invalid_value")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        text = f"limit is {limit[:40]!r}; it is a number from 1 to {most}"
        raise GatewayError(400, text, "limit", "invalid_value")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise GatewayError(400, "after names no item of this list", "after", "invalid_value")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(page) < len(ordered)}
