"""Tools: makes the model call functions, and reads calls out of its text.

    auto        free text, in which OPENING begins a call of one of the tools, which then has its form; the output ends
                with the first call where parallel_tool_calls is false
    required    the output is one call, of any tool; a named function: of that tool
    none        the prompt leaves the tools out

A call is written as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>, as Hermes and Qwen write it. The chat template,
if it shows tools, puts them into the prompt.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.formats import forms_asked
from gateway.messages import ChatMessage, ChatRequest, Function, Tool, ToolChoice
from gateway.origin import OF_FUNCTIONS, Form, GuideOrigin
from gateway.response_messages import Asking, ResponseToolChoice

OPENING, CLOSING = "<tool_call>", "</tool_call>"


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


def wants_calls(message: ChatRequest | Asking) -> bool:
    """True if the answer may hold calls."""
    return toolset(message).may_be_called


def form_of_tools(message: ChatRequest | Asking) -> Form | None:
    """The form of an answer that may hold calls; None if no tool may be called. Raises GatewayError."""
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
    tag: dict[str, Any] = {"type": "structural_tag", "structures": [_structure(one) for one in chosen.values()]}
    tag |= {"triggers": [OPENING]} if asked.choice == "auto" else {"free_text": False}
    if not asked.are_parallel and "triggers" in tag:
        tag["at_most_one"] = True
    fields = tuple(f"tools[{i}]{asked.place}.parameters" for i in chosen)
    guide = {"type": "structural_tag", "text": msgspec.json.encode(tag).decode()}
    return Form(guide, GuideOrigin("tools", OF_FUNCTIONS, fields))


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


def _structure(function: Function) -> dict[str, Any]:
    """Without parameters a function takes an empty object."""
    schema = function.parameters
    if not schema:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    begin = f'{OPENING}{{"name": {json.dumps(function.name)}, "arguments": '
    return {"begin": begin, "schema": schema, "end": "}" + CLOSING}


def template_fields(turn: ChatMessage) -> dict[str, Any]:
    """Fields of a turn besides its text, as chat templates expect them: arguments are objects there."""
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        fields["tool_calls"] = [
            called_function(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = turn.tool_call_id
    return fields


def called_function(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier answer, as chat templates know it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


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
        """The content of the call with which the held text begins (None while it is incomplete), and the text behind it."""
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
    """True if a string of the JSON goes on behind the text."""
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
