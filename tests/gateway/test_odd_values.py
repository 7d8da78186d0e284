"""Values that JSON writes and no program can use; and failures of the gateway's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_a_reply_that_the_gateway_fails_at_is_an_error_in_the_shape_of_the_api(path: str, served: Served) -> None:
    turns: dict[str, Any] = {"messages": [{"role": "user", "content": "junk"}], "max_tokens": 9}
    prompts = {"completions": {"prompt": "junk"}, "responses": {"input": "junk"}}
    status, body, headers = served.request("POST", f"/v1/{path}", {"model": "everbatch", **prompts.get(path, turns)})
    assert status == 500 and headers["x-request-id"] in body["error"]["message"] and "MAR" not in str(body)
    if path == "messages":
        assert body["type"] == "error" and body["error"]["type"] == "api_error"
    else:
        assert body["error"]["code"] == "internal_error"


HALF = '{"a": "\\ud800"}'  # an escape of half a character, as a model may write one and a client sends it back


@pytest.mark.parametrize(
    "arguments", [HALF, '{"a": NaN}', '{"a": 1e999}', "{" * 3, '{"a": ' + "[" * 2000 + "]" * 2000 + "}"]
)
def test_arguments_of_an_earlier_call_are_shown_as_they_are_where_they_are_no_proper_json(
    arguments: str, served: Served, triton: FakeTriton
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    assert served.request("POST", "/v1/chat/completions", {"model": "everbatch", "messages": turns})[0] == 200
    items = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
    ]
    assert served.request("POST", "/v1/responses", {"model": "everbatch", "input": items})[0] == 200
    shown = [seen.body["messages"][0]["tool_calls"][0]["function"]["arguments"] for seen in triton.requests]
    assert shown == [arguments] * 2


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[[0, 1e999]]"])
@pytest.mark.parametrize(
    ("path", "field", "value", "named"),
    [
        ("chat/completions", "chat_template_kwargs", '{"a": N}', "chat_template_kwargs"),
        ("chat/completions", "guided_json", '{"const": N}', "guided_json"),
        ("chat/completions", "structured_outputs", '{"json": {"const": N}}', "structured_outputs.json"),
        (
            "chat/completions",
            "tools",
            '[{"type": "function", "function": {"name": "f", "parameters": {"const": N}}}]',
            "tools[0].function.parameters",
        ),
        ("messages", "tools", '[{"name": "f", "input_schema": {"const": N}}]', "tools[0].input_schema"),
        ("messages/count_tokens", "chat_template_kwargs", '{"a": {"b": N}}', "chat_template_kwargs"),
    ],
)
def test_an_infinite_number_in_an_object_that_is_passed_on_is_refused(
    path: str, field: str, value: str, named: str, number: str, served: Served, triton: FakeTriton
) -> None:
    """The model would get null in its place."""
    fields: dict[str, Any] = {"model": "everbatch", "messages": [{"role": "user", "content": "a"}]}
    fields |= {} if "count" in path else {"max_tokens": 9}
    data = json.dumps({**fields, field: "HERE"}).replace('"HERE"', value.replace("N", number))
    status, answer, _ = served.request("POST", f"/v1/{path}", data.encode())
    assert status == 400 and not triton.requests
    assert f"{named} is an object; it should be an object whose numbers are finite" in answer["error"]["message"]
