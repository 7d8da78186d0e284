"""Items of /v1/responses and /v1/conversations: messages, calls of functions and their outputs, as the API shows them, and as the
turns that a chat template reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.errors import GatewayError
from gateway.response_messages import FunctionCallItem, FunctionOutputItem, InputMessage, ReasoningItem
from gateway.tools import called_function

Item = dict[str, Any]
AnyItem = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem
MOST_LISTED, LISTED = 100, 20  # items of one page: at most, and unless asked for


def items_of(given: str | Sequence[AnyItem]) -> list[Item]:
    """The items that a client sends, each with an id."""
    if isinstance(given, str):
        return [message_item("user", given)]
    return [_item(one) for one in given]


def _item(given: AnyItem) -> Item:
    match given:
        case InputMessage():
            text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
            return message_item(given.role, text, given.id)
        case FunctionCallItem():
            return call_item(given.call_id, given.name, given.arguments, given.id)
        case FunctionOutputItem():
            output = given.output if isinstance(given.output, str) else "".join(part.text for part in given.output)
            return output_item(given.call_id, output, given.id)
        case ReasoningItem():
            return reasoning_item("".join(part.text for part in given.content or []), given.id)


def message_item(role: str, text: str, item_id: str | None = None) -> Item:
    is_answer = role == "assistant"
    part: Item = {"type": "output_text" if is_answer else "input_text", "text": text}
    if is_answer:
        part |= {"annotations": [], "logprobs": []}
    own = {"id": item_id or new_id("msg"), "type": "message", "status": "completed"}
    return {**own, "role": role, "content": [part]}


def call_item(call_id: str, name: str, arguments: str, item_id: str | None = None, status: str = "completed") -> Item:
    own = {"id": item_id or new_id("fc"), "type": "function_call", "status": status}
    return {**own, "call_id": call_id, "name": name, "arguments": arguments}


def output_item(call_id: str, output: str, item_id: str | None = None) -> Item:
    """The result of a call."""
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
            turns.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            turns.append({"role": role, "content": "".join(part["text"] for part in item["content"])})
        if reasoning and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return turns


def listed(items: Sequence[Item], limit: str, order: str, after: str) -> dict[str, Any]:
    """One page of items, the newest first unless `order` says asc. Raises GatewayError for what is asked wrongly."""
    if order not in ("asc", "desc"):
        raise GatewayError(400, f"order is {order[:40]!r}; it is asc or desc", "order", "invalid_value")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST_LISTED):
        text = f"limit is {limit[:40]!r}; it is a number from 1 to {MOST_LISTED}"
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
