"""Functions in /v1/responses as the openai package and OpenAI's Agents SDK use them, the items of inputs, and counted tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Of a city", "parameters": PLACE, "strict": True},
    {"type": "function", "name": "clock", "parameters": None, "strict": False},
]
WEATHER = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
CLOCK = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
SAID = f"say Let me see.{WEATHER}\n{CLOCK}"
ITEM_EVENTS = ["response.output_item.added", "response.content_part.added"]
ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def outline(response: Any) -> list[Any]:
    """Text of each message and (name, arguments) of each call, in their order."""
    found: list[Any] = []
    for item in response.output:
        if isinstance(item, ResponseFunctionToolCall):
            found.append((item.name, item.arguments))
        else:
            assert isinstance(item, ResponseOutputMessage)
            found.append("".join(part.text for part in item.content if part.type == "output_text"))
    return found


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SAID, ["Let me see.", ("weather", '{"city": "Köln"}'), ("clock", "{}")]),
        (f"say {WEATHER}", [("weather", '{"city": "Köln"}')]),
        (f"say {WEATHER} and {CLOCK}", [("weather", '{"city": "Köln"}'), " and ", ("clock", "{}")]),
        ("say no call", ["no call"]),
        ("say  ", [" "]),
        ("say half <tool_call>{", ["half <tool_call>{"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_of_the_output(said: str, expected: list[Any], stream: bool, client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "input": said, "tools": TOOLS}
    if stream:
        with client.responses.stream(**values) as events:
            assert outline(events.get_final_response()) == expected
    else:
        response = client.responses.create(**values)
        assert outline(response) == expected
        assert response.status == "completed"
        assert client.responses.retrieve(response.id) == response
        ids = [item.id for item in response.output]
        assert len(set(ids)) == len(ids)


def test_a_stream_tells_each_item_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "input": SAID, "tools": TOOLS}
    events: list[Any] = list(client.responses.create(**values, stream=True))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    opening = ["response.created", "response.in_progress"]
    assert kinds == [*opening, *ITEM_EVENTS, *ENDS, *CALL_EVENTS, *CALL_EVENTS, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    output = events[-1].response.output
    assert [event.item for event in events if event.type == "response.output_item.done"] == output
    for event in events:
        if event.type.startswith("response.function_call_arguments"):
            assert event.item_id == output[event.output_index].id
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == [item.arguments for item in output[1:]]


def test_the_model_is_shown_the_tools_and_guided_to_call_them(client: openai.OpenAI, triton: FakeTriton) -> None:
    values: Any = {"model": "everbatch", "input": "say x", "tools": TOOLS}
    client.responses.create(**values)
    auto = triton.last().body
    assert [tool["function"]["name"] for tool in auto["tools"]] == ["weather", "clock"]
    assert auto["tools"][0] == {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": PLACE, "strict": True},
    }
    tag = json.loads(auto["guide"]["text"])
    assert tag["triggers"] == ["<tool_call>"] and tag["structures"][0]["schema"] == PLACE
    response = client.responses.create(**values, tool_choice={"type": "function", "name": "clock"})
    tag = json.loads(triton.last().body["guide"]["text"])
    assert tag["free_text"] is False and len(tag["structures"]) == 1 and '"clock"' in tag["structures"][0]["begin"]
    assert response.tool_choice.name == "clock" and [tool.name for tool in response.tools] == ["weather", "clock"]  # type: ignore[union-attr]
    client.responses.create(**values, parallel_tool_calls=False)
    assert json.loads(triton.last().body["guide"]["text"])["at_most_one"] is True
    client.responses.create(**values, tool_choice="none")
    assert not {"tools", "guide"} & set(triton.last().body)


@pytest.mark.parametrize("unset_left_out", [True, False])
def test_results_of_calls_are_sent_back_as_the_agents_sdk_does(
    unset_left_out: bool, client: openai.OpenAI, triton: FakeTriton
) -> None:
    """By the whole list of items, and by previous_response_id: the model sees the same turns."""
    values: Any = {"model": "everbatch", "tools": TOOLS}
    asked: Any = [{"role": "user", "content": SAID}]
    first = client.responses.create(**values, input=asked)
    called: Any = [item.model_dump(exclude_unset=unset_left_out) for item in first.output]
    results: Any = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"result {i}"}
        for i, item in enumerate(called[1:])
    ]
    client.responses.create(**values, input=[*asked, *called, *results])
    whole = triton.last().body["messages"]
    client.responses.create(**values, input=results, previous_response_id=first.id)
    assert triton.last().body["messages"] == whole
    question, answer, *told = whole
    assert question == {"role": "user", "content": SAID} and answer["content"] == "Let me see."
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Köln"}},
        {"name": "clock", "arguments": {}},
    ]
    assert told == [
        {"role": "tool", "content": f"result {i}", "tool_call_id": item["call_id"]} for i, item in enumerate(called[1:])
    ]


def test_a_call_alone_makes_an_answer_without_text(client: openai.OpenAI, triton: FakeTriton) -> None:
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "no json"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    client.responses.create(model="everbatch", input=items)
    assert triton.last().body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "no json"}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]


def test_the_text_beside_calls_keeps_its_log_probabilities(client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "input": SAID, "tools": TOOLS, "top_logprobs": 0}
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    events: list[Any] = list(client.responses.create(**values, include=include, stream=True))
    part = events[-1].response.output[0].content[0]
    streamed = [
        token.token for event in events if event.type == "response.output_text.delta" for token in event.logprobs
    ]
    assert [token.token for token in part.logprobs] == streamed and "".join(streamed).startswith("Let me see.")


@pytest.mark.parametrize(
    ("added", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is 'web_search'; it should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools; send tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "none of the tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools have the same name, weather"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "is missing"),
        ({"input": [{"type": "computer_call", "call_id": "c"}]}, "input[0].type", "is 'computer_call'; it is one of"),
        ({"input": [{"type": ["x"]}]}, "input[0]", ""),
    ],
)
def test_what_is_wrong_with_tools_and_items_is_named(
    added: dict[str, Any], param: str, words: str, served: Served
) -> None:
    status, answer, _ = served.request("POST", "/v1/responses", {"model": "everbatch", "input": "x", **added})
    assert status == 400 and answer["error"]["param"].startswith(param), answer
    assert words in answer["error"]["message"]


def test_a_schema_that_the_model_refuses_is_blamed_on_its_tool(served: Served) -> None:
    said = "error [INVALID_ARGUMENT] guide.structures[1].schema: no"
    body = {"model": "everbatch", "input": said, "tools": TOOLS}
    status, answer, _ = served.request("POST", "/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, "tools[1].parameters")
    assert answer["error"]["code"] == "invalid_function_parameters"


def test_the_items_of_an_input_are_listed_page_by_page(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}", "id": "fc_own"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"role": "assistant", "content": "two"},
    ]
    response = client.responses.create(model="everbatch", input=items)
    newest_first: list[Any] = list(client.responses.input_items.list(response.id, limit=3))
    oldest_first: list[Any] = list(client.responses.input_items.list(response.id, order="asc"))
    assert newest_first == oldest_first[::-1] and len(newest_first) == 4, "the package asks for the second page"
    assert [item.type for item in oldest_first] == ["message", "function_call", "function_call_output", "message"]
    assert oldest_first[0].content[0].text == "one" and oldest_first[1].id == "fc_own"
    page = client.responses.input_items.list(response.id, limit=1, order="asc")
    assert page.has_more and page.last_id == oldest_first[0].id  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_a_page_that_there_is_not_is_refused(query: str, param: str, served: Served, client: openai.OpenAI) -> None:
    response = client.responses.create(model="everbatch", input="one")
    status, answer, _ = served.request("GET", f"/v1/responses/{response.id}/input_items?{query}")
    assert (status, answer["error"]["param"]) == (400, param)
    assert served.request("GET", f"/v1/responses/resp_0/input_items?{query}")[0] == 404


def test_tokens_are_counted_and_nothing_is_generated(client: openai.OpenAI, triton: FakeTriton) -> None:
    first = client.responses.create(model="everbatch", input="one")
    values: Any = {"model": "everbatch", "input": "two", "instructions": "Rule.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**values, previous_response_id=first.id)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 7)
    body = triton.last().body
    assert body["tokenize"] is True and [turn["content"] for turn in body["messages"]][::3] == ["Rule.", "two"]
    assert len(body["tools"]) == 2
