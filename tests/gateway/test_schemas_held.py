"""How far the schemas of tools are held: in full where the client says `strict`, else as far as can be, which a header tells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend.guided.protocol import GuideError
from gateway.anthropic_messages import MessagesRequest
from gateway.anthropic_turns import as_chat, messages
from gateway.dialect import DEFAULT
from gateway.invalid import parse
from gateway.messages import ChatRequest
from gateway.response_messages import ResponseRequest
from gateway.translate import Asked, chat, response
from tests.gateway.conftest import Served
from tests.guided.tools import compiled

HEADER = "x-everbatch-not-held"
SCHEMA = {"type": "object", "properties": {"a": {"not": {"const": 1}}}, "required": ["a"]}
SAYS = [{"role": "user", "content": "hi"}]


def of_chat(strict: bool | None, choice: str) -> Asked:
    function = {"name": "f", "parameters": SCHEMA} | ({} if strict is None else {"strict": strict})
    body = {
        "model": "m",
        "messages": SAYS,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    return chat(parse(ChatRequest, json.dumps(body).encode())[0])


def of_responses(strict: bool | None, choice: str) -> Asked:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA} | ({} if strict is None else {"strict": strict})
    body = {"model": "m", "input": "hi", "tools": [tool], "tool_choice": choice}
    return response(parse(ResponseRequest, json.dumps(body).encode())[0], [], [])


def of_messages(strict: bool | None, choice: str) -> Asked:
    tool = {"name": "f", "input_schema": SCHEMA} | ({} if strict is None else {"strict": strict})
    of_choice = {"auto": "auto", "required": "any"}[choice]
    body = {"model": "m", "max_tokens": 5, "messages": SAYS, "tools": [tool], "tool_choice": {"type": of_choice}}
    message, _ = parse(MessagesRequest, json.dumps(body).encode())
    return messages(message, as_chat(message, DEFAULT), DEFAULT)


WIRES = {
    of_chat: "tools[0].function.parameters",
    of_responses: "tools[0].parameters",
    of_messages: "tools[0].input_schema",
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("wire", WIRES)
def test_without_strict_a_tool_s_schema_is_held_as_far_as_it_can_be(wire: Any, choice: str) -> None:
    for strict in (None, False):
        asked = wire(strict, choice)
        (note,) = compiled(asked.request["guide"]["type"], asked.request["guide"]["text"]).notes
        assert asked.origin is not None and asked.origin.named(note) == f"{WIRES[wire]}.properties.a: not"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("wire", WIRES)
def test_with_strict_it_is_refused(wire: Any, choice: str) -> None:
    asked = wire(True, choice)
    with pytest.raises(GuideError, match="not") as caught:
        compiled(asked.request["guide"]["type"], asked.request["guide"]["text"])
    assert asked.origin is not None and asked.origin.field_at(caught.value.place) == WIRES[wire]


@pytest.mark.parametrize("wire", WIRES)
def test_a_forced_call_has_declared_arguments_only(wire: Any) -> None:
    for choice, is_closed in (("auto", False), ("required", True)):
        (structure,) = json.loads(wire(None, choice).request["guide"]["text"])["structures"]
        assert structure.get("closed", False) is is_closed


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_held_is_told_in_a_header(stream: bool, served: Served) -> None:
    """By the client's own field; printable, and not for ever long."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    for note, told in {
        ".structures[0].schema.properties.a: not": "tools[0].function.parameters.properties.a: not",
        '.structures[0].schema.properties["ä\n"]: if': 'tools[0].function.parameters.properties["\\xe4?"]: if',
        f".structures[0].schema.{'x' * 9000}: if": f"tools[0].function.parameters.{'x' * 9000}"[:2000],
    }.items():
        body = {"model": "everbatch", "messages": [{"role": "user", "content": f"noted {note}"}], "tools": tools}
        status, _, headers = served.request("POST", "/v1/chat/completions", {**body, "stream": stream})
        assert (status, headers.get(HEADER)) == (200, told)
    body["messages"] = SAYS
    assert HEADER not in served.request("POST", "/v1/chat/completions", {**body, "stream": stream})[2]
