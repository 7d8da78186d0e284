"""Tools for a chat template that knows none: a text describes them, and calls and results of earlier turns become text.

The text asks for calls as the whole answer, in JSON without marks, which the endpoint reads in every format that is JSON.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2.nodes

Message = dict[str, Any]
_INTRODUCTION = "You can call these functions. Each line describes one of them, with the JSON schema of its arguments:"
_HOW = (
    'To call one, answer with a JSON object and nothing else: {"name": NAME OF THE FUNCTION, "arguments": OBJECT OF ARGUMENTS}. '
    "To call several, answer with a list of such objects. You are then told the results. Otherwise answer as usual."
)


def knows_tools(tree: jinja2.nodes.Template) -> bool:
    """True if a template reads the variable `tools`."""
    return any(name.name == "tools" for name in tree.find_all(jinja2.nodes.Name))


def with_tools(messages: list[Message], tools: list[Message], takes_system: bool) -> list[Message]:
    """The messages with a description of the tools behind the system message, or ahead of the first message where the template
    takes no system message.
    """
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    text = "\n".join([_INTRODUCTION, *(json.dumps(each, ensure_ascii=False) for each in functions), "", _HOW])
    first, rest = messages[0], messages[1:]
    if first["role"] == "system":
        return [{**first, "content": _joined(first.get("content"), text)}, *rest]
    if takes_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _joined(text, first.get("content"))}, *rest]


def without_calls(messages: list[Message]) -> list[Message]:
    """The messages with calls and results as text. Results are the user's words, in one message with others of the user's next
    to them, for templates may want users and assistants to take turns.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # id of a call -> name of its function
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        written = _result(message, names) if is_result else _calls(message, names)
        if found and found[-1]["role"] == written["role"] == "user" and (is_result or was_result):
            found[-1] = {**found[-1], "content": _joined(found[-1].get("content"), written.get("content"))}
        else:
            found.append(written)
        was_result = is_result
    return found


def _calls(message: Message, names: dict[str, str]) -> Message:
    """A message with its calls as text; takes note of their names."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    written = list[Any]()
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        function = function if isinstance(function, dict) else {}
        written.append({"name": function.get("name"), "arguments": function.get("arguments")})
        names[str(call.get("id")) if isinstance(call, dict) else ""] = str(function.get("name"))
    text = json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": _joined(message.get("content"), text)}


def _result(message: Message, names: dict[str, str]) -> Message:
    name = message.get("name") or names.get(str(message.get("tool_call_id")), "the function")
    return {"role": "user", "content": _joined(f"Result of {name}:", message.get("content"), "\n")}


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents of messages, each a text, a list of parts, or nothing."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], *parts[1]] if all(isinstance(each, list) for each in parts) else first
