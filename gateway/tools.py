"""Tools: what makes the model call functions, and calls read out of its text.

    auto        free text, in which OPENING begins a call of one of the tools, which then has its form; the output ends
                with the first call where parallel_tool_calls is false
    required    the output is one call, of any tool; a named function: of that tool
    none        the model is not told of the tools

A call is written as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>, as Hermes and Qwen write it. The model is told of
the tools by its chat template, if that shows any.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.messages import ChatMessage, ChatRequest, FunctionChoice, TextFormat, Tool, ToolChoice
from gateway.origin import OF_FUNCTIONS, Form, GuideOrigin

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def wants_calls(message: ChatRequest) -> bool:
    """Whether the answer may hold calls."""
    return bool(message.tools) and message.tool_choice != "none"


def form_of_tools(message: ChatRequest) -> Form | None:
    """What makes the answer one with calls; None where no tool may be called. Raises GatewayError."""
    choice = message.tool_choice
    if not message.tools:
        if choice not in (None, "none", "auto"):
            raise GatewayError(
                400, "tool_choice asks for a call, and there are no tools", "tool_choice", "invalid_value"
            )
        return None
    names = [tool.function.name for tool in message.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GatewayError(400, f"two tools have the same name, {twice}; rename one", "tools", "invalid_value")
    if choice == "none":
        return None
    other = next((name for name in ("response_format", "structured_outputs") if _asks(message, name)), None)
    if other is not None:
        text = f"{other} and tools both say what the answer looks like; leave one out, or send tool_choice none"
        raise GatewayError(400, text, other, "invalid_value")
    tools = _chosen(message.tools, choice.function if isinstance(choice, ToolChoice) else None)
    tag: dict[str, Any] = {"type": "structural_tag", "structures": [_structure(tool) for tool in tools.values()]}
    tag |= {"triggers": [OPENING]} if choice in (None, "auto") else {"free_text": False}
    if message.parallel_tool_calls is False and "triggers" in tag:
        tag["at_most_one"] = True
    fields = tuple(f"tools[{i}].function.parameters" for i in tools)
    guide = {"type": "structural_tag", "text": msgspec.json.encode(tag).decode()}
    return Form(guide, GuideOrigin("tools", OF_FUNCTIONS, fields))


def shown_tools(message: ChatRequest) -> dict[str, Any]:
    """The field `tools` of the request, which its chat template shows to the model; none where no tool may be called."""
    if not message.tools or not wants_calls(message):
        return {}
    return {"tools": [tool.model_dump(exclude_none=True) for tool in message.tools]}


def _asks(message: ChatRequest, name: str) -> bool:
    value = getattr(message, name)
    return value is not None and not isinstance(value, TextFormat)


def _chosen(tools: list[Tool], named: FunctionChoice | None) -> dict[int, Tool]:
    """The tools that may be called, by their places among all. Raises GatewayError."""
    found = {i: tool for i, tool in enumerate(tools) if named is None or tool.function.name == named.name}
    if named is not None and not found:
        text = f"tool_choice names {named.name!r}, which is none of the tools"
        raise GatewayError(400, text, "tool_choice.function.name", "invalid_value")
    return found


def _structure(tool: Tool) -> dict[str, Any]:
    """Without parameters a function takes an empty object."""
    function = tool.function
    schema = function.parameters
    if not schema:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    begin = f'{OPENING}{{"name": {json.dumps(function.name)}, "arguments": '
    return {"begin": begin, "schema": schema, "end": "}" + CLOSING}


def template_fields(turn: ChatMessage) -> dict[str, Any]:
    """What a turn has besides its text, as chat templates know it: arguments are objects there."""
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        calls = [(call.id, call.function.name, _arguments(call.function.arguments)) for call in turn.tool_calls]
        fields["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in calls
        ]
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = turn.tool_call_id
    return fields


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # whatever a client sends back is shown to the model


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Takes the text of one answer piece by piece, and tells its content and its calls in their order.

    What may be the beginning of OPENING is held back until it is known, and a call until it is complete: up to a CLOSING
    behind which its JSON ends, for a string in it may hold one, too.
    """

    def __init__(self) -> None:
        self._held = ""
        self._searched = 0  # characters of it that hold no end of the call
        self.num_calls = 0

    def push(self, text: str) -> list[str | Call]:
        self._held += text
        found: list[str | Call] = []
        while self._held:
            start = self._held.find(OPENING)
            if start < 0:
                keep = _overlap(self._held)
                content, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return [*found, content] if content else found
            if start:
                found.append(self._held[:start])
                self._held = self._held[start:]
            inside, rest = self._first_call()
            if inside is None:
                return found
            call = _call(inside)
            found.append(OPENING + inside + CLOSING if call is None else call)
            self.num_calls += call is not None
            self._held, self._searched = rest, 0
        return found

    def _first_call(self) -> tuple[str | None, str]:
        """What stands in the call with which the held text begins, and the text behind it. None while it is not complete."""
        while (end := self._held.find(CLOSING, self._searched)) >= 0:
            self._searched = end + len(CLOSING)
            text = self._held[len(OPENING) : end]
            if not _ends_in_string(text):
                return text, self._held[self._searched :]
        self._searched = max(self._searched, len(self._held) - len(CLOSING) + 1)
        return None, ""

    def flush(self) -> str:
        """The answer is over: what was held back is content, a call that was cut off too."""
        held, self._held = self._held, ""
        return held


def _ends_in_string(text: str) -> bool:
    """Whether a string of the JSON goes on behind the text."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _call(text: str) -> Call | None:
    """None for what is no call of ours: a model that was not guided may write anything."""
    try:
        tree = json.loads(text)
        name, arguments = tree["name"], tree["arguments"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Call(f"call_{secrets.token_hex(12)}", str(name), json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """How many characters at the end of the text may begin OPENING."""
    sizes = range(min(len(text), len(OPENING) - 1), 0, -1)
    return next((size for size in sizes if OPENING.startswith(text[-size:])), 0)


def read_calls(text: str) -> tuple[str, list[Call]]:
    """The content and the calls of a whole answer."""
    reader = CallReader()
    found = [*reader.push(text), reader.flush()]
    content = "".join(part for part in found if isinstance(part, str))
    return content, [part for part in found if isinstance(part, Call)]
