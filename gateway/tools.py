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
from gateway.formats import form_of_text
from gateway.messages import AllowedToolsChoice, ChatMessage, ChatRequest, Function, Tool, ToolChoice
from gateway.origin import OF_FUNCTIONS, Form, GuideOrigin
from gateway.response_messages import Asking, ResponseAllowedTools, ResponseToolChoice
from gateway.tool_formats.format import ToolFormat

MOST_SHOWN = 10  # names of tools in a message


@dataclass(frozen=True)
class Toolset:
    """The tools of a request. `place`: of a function in an entry of the field `tools`."""

    functions: tuple[Function, ...]
    choice: str  # none, auto or required
    named: dict[str, str] | None  # the only functions that may be called, with the fields that name them
    place: str
    are_parallel: bool

    @property
    def may_be_called(self) -> bool:
        return bool(self.functions) and self.choice != "none"

    @property
    def callable(self) -> dict[int, Function]:
        """The functions that may be called, by their places among all."""
        return {i: one for i, one in enumerate(self.functions) if self.named is None or one.name in self.named}

    def check(self) -> None:
        """Raises GatewayError for tools and a choice that do not fit each other."""
        names = [function.name for function in self.functions]
        if not names and (self.choice == "required" or self.named is not None):
            text = "tool_choice asks for a call, and there are no tools; send tools, or leave it out"
            raise GatewayError(400, text, "tool_choice", "invalid_value")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise GatewayError(400, f"two tools have the same name, {twice}; rename one", "tools", "invalid_value")
        for name, field in (self.named or {}).items():
            if name not in names:
                shown = ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")
                text = f"tool_choice names {name!r}, which is none of the tools; they are {shown}"
                raise GatewayError(400, text, field, "invalid_value")


def toolset(message: ChatRequest | Asking) -> Toolset:
    """The tools of a request of either API."""
    choice, named = _choice(message.tool_choice or "auto")
    given = message.tools or []
    functions = tuple(tool.function if isinstance(tool, Tool) else tool for tool in given)
    place = "" if isinstance(message, Asking) else ".function"
    return Toolset(functions, choice, named, place, message.parallel_tool_calls is not False)


def _choice(
    wanted: str | ToolChoice | AllowedToolsChoice | ResponseToolChoice | ResponseAllowedTools,
) -> tuple[str, dict[str, str] | None]:
    """(none, auto or required, Toolset.named)"""
    match wanted:
        case str():
            return wanted, None
        case ToolChoice():
            return "required", {wanted.function.name: "tool_choice.function.name"}
        case ResponseToolChoice():
            return "required", {wanted.name: "tool_choice.name"}
        case AllowedToolsChoice(allowed_tools=allowed):
            place = "tool_choice.allowed_tools.tools[{}].function.name"
            return allowed.mode, {one.function.name: place.format(i) for i, one in enumerate(allowed.tools)}
        case ResponseAllowedTools():
            place = "tool_choice.tools[{}].name"
            return wanted.mode, {one.name: place.format(i) for i, one in enumerate(wanted.tools)}


def form_of_answer(message: ChatRequest | Asking, format: ToolFormat) -> Form | None:
    """The form of an answer: a call, text, or either. Raises GatewayError."""
    return form_of_tools(message, format) or form_of_text(message)


def form_of_tools(message: ChatRequest | Asking, format: ToolFormat) -> Form | None:
    """The form of an answer that may hold calls; None if no tool may be called, or where the format leaves free text alone.
    Raises GatewayError.
    """
    asked = toolset(message)
    asked.check()
    if not asked.may_be_called:
        return None
    text = form_of_text(message)
    if text is not None and text.guide["type"] not in ("json", "json_schema"):
        field = text.origin.field
        told = f"{field} and tools both say what the answer looks like; leave one out, or send tool_choice none"
        raise GatewayError(400, told, field, "invalid_value")
    if asked.choice == "auto" and text is not None:
        tag = _either(asked, format, text)
    elif asked.choice == "auto" and not format.trigger:
        return None
    else:
        tag = _calls(asked, format)
    fields = [f"tools[{i}]{asked.place}.parameters" for i in asked.callable]
    guide = {"type": "structural_tag", "text": msgspec.json.encode({"type": "structural_tag", **tag}).decode()}
    return Form(
        guide, GuideOrigin("tools", OF_FUNCTIONS, (*fields, *([text.origin.field] if text is not None else [])))
    )


def _calls(asked: Toolset, format: ToolFormat) -> dict[str, Any]:
    """A structural tag of calls: in free text, or one that must be made."""
    tag: dict[str, Any] = {"structures": _structures(asked, format)}
    if any(format.group):
        tag["group"] = format.group._asdict()
    if asked.choice == "required":
        return tag | {"free_text": False}
    return tag | {"triggers": [format.trigger]} | ({} if asked.are_parallel else {"at_most_one": True})


def _either(asked: Toolset, format: ToolFormat, text: Form) -> dict[str, Any]:
    """A structural tag of one call, or a text of the form that was asked for."""
    begin, _, end = format.group
    calls = [{**one, "begin": begin + one["begin"], "end": one["end"] + end} for one in _structures(asked, format)]
    try:
        schema = msgspec.json.decode(text.guide.get("text", '{"type": "object"}'))
    except msgspec.DecodeError:
        raise GatewayError(
            400, f"{text.origin.field} is no JSON; correct it", text.origin.field, text.origin.code
        ) from None
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    if calls[0]["begin"].startswith("{") or (begin == "[" and not is_object):
        told = "is not served beside tools here, for this model writes its calls as JSON too; leave one out"
        raise GatewayError(
            400, f"{text.origin.field} {told}, or send tool_choice none", text.origin.field, "invalid_value"
        )
    return {"structures": [*calls, {"begin": format.answer, "schema": schema, "end": ""}], "free_text": False}


def _structures(asked: Toolset, format: ToolFormat) -> list[dict[str, Any]]:
    """A structure of the tag for each function that may be called."""
    return [format.structure(one) | _holding(one, asked) for one in asked.callable.values()]


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
    or a lone surrogate, stays text. An empty text, as some models and clients write it for none, is an empty object.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value
