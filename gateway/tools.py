"""Tools: makes the model call functions.

    auto        free text, in which the format's trigger begins a call of one of the tools, which then has its form; the output
                ends with the first call where parallel_tool_calls is false
    required    the output is one call, of any tool; a named function: of that tool
    none        the prompt leaves the tools out

How a call is written is the model's own (tool_formats/). The chat template, if it shows tools, puts them into the prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.formats import forms_asked
from gateway.messages import ChatMessage, ChatRequest, Function, Tool, ToolChoice
from gateway.origin import OF_FUNCTIONS, Form, GuideOrigin
from gateway.response_messages import Asking, ResponseToolChoice
from gateway.tool_formats.format import ToolFormat


@dataclass(frozen=True)
class Toolset:
    """The tools of a request. `place`: of a function in an entry of the field `tools`."""

    functions: tuple[Function, ...]
    choice: str  # none, auto or required
    named: str | None  # the only function that may be called
    place: str
    are_parallel: bool

    @property
    def may_be_called(self) -> bool:
        return bool(self.functions) and self.choice != "none"


def toolset(message: ChatRequest | Asking) -> Toolset:
    """The tools of a request of either API."""
    wanted = message.tool_choice or "auto"
    named = None
    if isinstance(wanted, ToolChoice):
        named = wanted.function.name
    elif isinstance(wanted, ResponseToolChoice):
        named = wanted.name
    choice = wanted if isinstance(wanted, str) else "required"
    given = message.tools or []
    functions = tuple(tool.function if isinstance(tool, Tool) else tool for tool in given)
    place = "" if isinstance(message, Asking) else ".function"
    return Toolset(functions, choice, named, place, message.parallel_tool_calls is not False)


def form_of_tools(message: ChatRequest | Asking, format: ToolFormat) -> Form | None:
    """The form of an answer that may hold calls; None if no tool may be called, or where the format leaves free text alone.
    Raises GatewayError.
    """
    asked = toolset(message)
    if not asked.functions:
        if asked.choice == "required":
            text = "tool_choice asks for a call, and there are no tools; send tools, or leave it out"
            raise GatewayError(400, text, "tool_choice", "invalid_value")
        return None
    names = [function.name for function in asked.functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GatewayError(400, f"two tools have the same name, {twice}; rename one", "tools", "invalid_value")
    if asked.choice == "none":
        return None
    if other := next(iter(forms_asked(message)), None):
        text = f"{other} and tools both say what the answer looks like; leave one out, or send tool_choice none"
        raise GatewayError(400, text, other, "invalid_value")
    chosen = _chosen(asked)
    if asked.choice == "auto" and not format.trigger:
        return None
    structures = [format.structure(one) | _holding(one, asked) for one in chosen.values()]
    tag: dict[str, Any] = {"type": "structural_tag", "structures": structures}
    if any(format.group):
        tag["group"] = format.group._asdict()
    tag |= {"triggers": [format.trigger]} if asked.choice == "auto" else {"free_text": False}
    if not asked.are_parallel and "triggers" in tag:
        tag["at_most_one"] = True
    fields = tuple(f"tools[{i}]{asked.place}.parameters" for i in chosen)
    guide = {"type": "structural_tag", "text": msgspec.json.encode(tag).decode()}
    return Form(guide, GuideOrigin("tools", OF_FUNCTIONS, fields))


def _holding(function: Function, asked: Toolset) -> dict[str, Any]:
    """How far the schema of a function is held: all of it where the client says `strict`, else what can be held. A call that must
    be made has declared arguments only.
    """
    held = {} if function.strict else {"hold": "most"}
    return held if asked.choice == "auto" else {**held, "closed": True}


def shown_tools(message: ChatRequest | Asking) -> dict[str, Any]:
    """The field `tools` of the request, which its chat template shows to the model; none where no tool may be called."""
    asked = toolset(message)
    if not asked.may_be_called:
        return {}
    keys = set(Function.model_fields)
    functions = [function.model_dump(include=keys, exclude_none=True) for function in asked.functions]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def _chosen(asked: Toolset) -> dict[int, Function]:
    """The functions that may be called, by their places among all. Raises GatewayError."""
    found = {i: one for i, one in enumerate(asked.functions) if asked.named in (None, one.name)}
    if not found:
        text = f"tool_choice names {asked.named!r}, which is none of the tools"
        raise GatewayError(400, text, f"tool_choice{asked.place}.name", "invalid_value")
    return found


def template_fields(turn: ChatMessage) -> dict[str, Any]:
    """Fields of a turn besides its text, as chat templates expect them: arguments are objects there."""
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        fields["tool_calls"] = [
            called_function(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = turn.tool_call_id
    reasoning = turn.reasoning_content if turn.reasoning_content is not None else turn.reasoning
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return fields


def called_function(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier answer, as chat templates know it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(text: str) -> Any:
    """The arguments of a call as the object that chat templates expect. Text that is not JSON, and JSON with an infinite number
    or a lone surrogate, stays text.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value
