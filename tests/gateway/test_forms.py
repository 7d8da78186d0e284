"""response_format, and tools with tool_choice, as the openai package uses them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.gateway.fake_triton import FakeTriton

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def says(text: str) -> Any:
    return [{"role": "user", "content": f"say {text}"}]


@pytest.mark.parametrize(
    ("format", "guide"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            {"type": "json_schema", "text": json.dumps(SCHEMA, separators=(",", ":"))},
        ),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "json"}),
    ],
)
def test_a_response_format_is_the_guide_of_the_request(
    format: Any, guide: Any, client: openai.OpenAI, triton: FakeTriton
) -> None:
    client.chat.completions.create(model="everbatch", messages=says("x"), response_format=format)
    assert triton.last().body.get("guide") == guide
    client.completions.create(model="everbatch", prompt="x", extra_body={"response_format": format})
    assert triton.last().body.get("guide") == guide
    schema = format.get("json_schema", {})
    flat = {"type": format["type"], **schema}
    reply = client.responses.create(model="everbatch", input="x", text={"format": flat})  # type: ignore[misc]
    assert triton.last().body.get("guide") == guide
    assert reply.text is not None and reply.text.format is not None and reply.text.format.type == format["type"]


@pytest.mark.parametrize(
    ("asked", "guide"),
    [
        ({"json": SCHEMA}, {"type": "json_schema", "text": json.dumps(SCHEMA, separators=(",", ":"))}),
        ({"json": json.dumps(SCHEMA)}, {"type": "json_schema", "text": json.dumps(SCHEMA)}),
        ({"json_object": True}, {"type": "json"}),
        ({"regex": "a+"}, {"type": "regex", "text": "a+"}),
        ({"choice": ["yes", "no (b)"]}, {"type": "regex", "text": r"yes|no\ \(b\)"}),
        ({"grammar": 'start: "a"'}, {"type": "ebnf_grammar", "text": 'start: "a"'}),
        ({"structural_tag": {"structures": []}}, {"type": "structural_tag", "text": '{"structures":[]}'}),
    ],
)
def test_structured_outputs_of_vllm_are_the_guide_of_the_request(
    asked: Any, guide: Any, client: openai.OpenAI, triton: FakeTriton
) -> None:
    more = {"structured_outputs": asked}
    client.chat.completions.create(model="everbatch", messages=says("x"), extra_body=more)
    assert triton.last().body["guide"] == guide
    client.completions.create(model="everbatch", prompt="x", extra_body=more)
    assert triton.last().body["guide"] == guide


def guide_of(triton: FakeTriton) -> Any:
    guide = triton.last().body["guide"]
    assert guide["type"] == "structural_tag"
    return json.loads(guide["text"])


def test_auto_leaves_text_free_and_binds_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    tools: Any = [ADD, NOW]
    reply = client.chat.completions.create(model="everbatch", messages=says(f"Let me see. {CALL}"), tools=tools)
    tag = guide_of(triton)
    assert tag["triggers"] == ["<tool_call>"] and "free_text" not in tag
    assert tag["structures"][0] == {
        "begin": '<tool_call>{"name": "add", "arguments": ', "schema": SCHEMA, "end": "}</tool_call>", "hold": "most"
    }  # fmt: skip
    assert tag["structures"][1]["schema"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert [tool["function"]["name"] for tool in triton.last().body["tools"]] == ["add", "now"]
    (choice,) = reply.choices
    assert choice.message.content == "Let me see. " and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})


def test_without_parallel_calls_the_answer_ends_with_the_first_one(client: openai.OpenAI, triton: FakeTriton) -> None:
    tools: Any = [ADD]
    for parallel, expected in ((False, True), (True, None)):
        client.chat.completions.create(model="everbatch", messages=says("x"), tools=tools, parallel_tool_calls=parallel)
        assert guide_of(triton).get("at_most_one") is expected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_required_and_a_named_function_make_one_call(choice: Any, client: openai.OpenAI, triton: FakeTriton) -> None:
    tools: Any = [NOW, ADD]
    reply = client.chat.completions.create(model="everbatch", messages=says(CALL), tools=tools, tool_choice=choice)
    tag = guide_of(triton)
    names = [json.loads(each["begin"].removeprefix("<tool_call>") + "0}")["name"] for each in tag["structures"]]
    assert tag["free_text"] is False and names == (["now", "add"] if choice == "required" else ["add"])
    message = reply.choices[0].message
    assert message.content is None and len(message.tool_calls or []) == 1


def test_none_says_nothing_of_tools(client: openai.OpenAI, triton: FakeTriton) -> None:
    tools: Any = [ADD]
    reply = client.chat.completions.create(model="everbatch", messages=says(CALL), tools=tools, tool_choice="none")
    assert "guide" not in triton.last().body and "tools" not in triton.last().body
    assert reply.choices[0].message.content == CALL and reply.choices[0].finish_reason == "stop"


def test_a_stream_tells_content_and_calls_in_their_order(client: openai.OpenAI) -> None:
    tools: Any = [ADD]
    stream = client.chat.completions.create(
        model="everbatch", messages=says(f"a < b <tool {CALL} and {CALL} end"), tools=tools, stream=True
    )
    told: list[str] = []
    reason = None
    for chunk in stream:
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.function is not None and call.id is not None
            told.append(f"{call.index}:{call.function.name}:{call.function.arguments}")
        told.append(choice.delta.content or "")
    assert "".join(told) == 'a < b <tool 0:add:{"a": 1} and 1:add:{"a": 1} end' and reason == "tool_calls"


def test_calls_and_results_reach_the_template(client: openai.OpenAI, triton: FakeTriton) -> None:
    tools: Any = [ADD]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    client.chat.completions.create(model="everbatch", messages=turns, tools=tools)
    sent = triton.last().body["messages"]
    function = {"name": "add", "arguments": {"a": 1}}
    assert sent[1] == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
    assert sent[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
