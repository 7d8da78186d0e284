"""Reasoning and calls in the model's own format, as the openai package and raw requests see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.tool_formats.table import TOOL_FORMATS
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton

THOUGHT = "say <think>\nHm, 1 < 2.\n</think>\n\nYes."
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OWN_ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '[TOOL_CALLS][{"name": "add", "arguments": {}}]'


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def thinking(shared_triton: FakeTriton) -> Iterator[Served]:
    with serving(shared_triton.url, reasoning_format="think", tool_format="mistral") as served:
        served.wait_healthy()
        yield served


@pytest.fixture
def client(thinking: Served, triton: FakeTriton) -> Iterator[openai.OpenAI]:
    with thinking.client() as client:
        yield client


def test_reasoning_is_no_content(client: openai.OpenAI, triton: FakeTriton) -> None:
    reply = client.chat.completions.create(model="everbatch", messages=says(THOUGHT))
    message: Any = reply.choices[0].message
    assert message.content == "Yes." and message.reasoning_content == message.reasoning == "Hm, 1 < 2."
    assert triton.last().body["reasoning"] == {"start": "<think>", "end": "</think>"}
    assert triton.last().body["visible_tokens"] == ["<think>", "</think>"]
    plain: Any = client.chat.completions.create(model="everbatch", messages=says("say Yes.")).choices[0].message
    assert plain.content == "Yes." and not hasattr(plain, "reasoning_content")


def test_a_stream_tells_reasoning_in_deltas_of_its_own(client: openai.OpenAI) -> None:
    reasoning, content = "", ""
    for chunk in client.chat.completions.create(model="everbatch", messages=says(THOUGHT), stream=True):
        delta: Any = chunk.choices[0].delta
        assert not (content and getattr(delta, "reasoning_content", None)), "reasoning comes first"
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == ("Hm, 1 < 2.", "Yes.")
    with client.chat.completions.stream(model="everbatch", messages=says(THOUGHT)) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_an_item_of_reasoning_with_its_events(client: openai.OpenAI, stream: bool) -> None:
    kinds: list[str] = []
    if stream:
        with client.responses.stream(model="everbatch", input=THOUGHT) as events:
            told = ""
            for event in events:
                kinds.append(event.type)
                told += event.delta if event.type == "response.reasoning_text.delta" else ""
            response: Any = events.get_final_response()
        assert told == "Hm, 1 < 2."
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    else:
        response = client.responses.create(model="everbatch", input=THOUGHT)
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm, 1 < 2.", [])
    assert message.content[0].text == response.output_text == "Yes."


def test_reasoning_of_earlier_turns_reaches_the_template(client: openai.OpenAI, triton: FakeTriton) -> None:
    for key in ("reasoning_content", "reasoning"):
        turns: Any = [*says("one"), {"role": "assistant", "content": "two", key: "because"}, *says("say x")]
        client.chat.completions.create(model="everbatch", messages=turns)
        assert triton.last().body["messages"][1] == {
            "role": "assistant",
            "content": "two",
            "reasoning_content": "because",
        }
    first = client.responses.create(model="everbatch", input=THOUGHT)
    expected = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, 1 < 2."}
    client.responses.create(model="everbatch", input="say x", previous_response_id=first.id)
    assert triton.last().body["messages"][1] == expected
    items: Any = [*says(THOUGHT), *(item.model_dump() for item in first.output), *says("say x")]
    client.responses.create(model="everbatch", input=items)
    assert triton.last().body["messages"][1] == expected


def test_reasoning_can_be_left_out_or_left_in(client: openai.OpenAI) -> None:
    def message(**fields: Any) -> Any:
        reply = client.chat.completions.create(model="everbatch", messages=says(THOUGHT), extra_body=fields)
        return reply.choices[0].message

    out, inside = message(include_reasoning=False), message(separate_reasoning=False)
    assert out.content == "Yes." and not hasattr(out, "reasoning_content")
    assert inside.content == THOUGHT.removeprefix("say ") and not hasattr(inside, "reasoning_content")


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget", "max_reasoning_tokens"])
def test_a_budget_is_the_model_s(name: str, client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(model="everbatch", messages=says("say x"), extra_body={name: 7})
    assert triton.last().body["reasoning"]["max_tokens"] == 7
    client.responses.create(model="everbatch", input="say x", extra_body={name: 0})
    assert triton.last().body["reasoning"]["max_tokens"] == 0


def test_a_budget_that_cannot_be_held_is_refused(client: openai.OpenAI, served: Served) -> None:
    def error(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="everbatch", messages=says("x"), extra_body=fields)
        return caught.value

    assert error(client, thinking_budget=1, max_reasoning_tokens=2).param == "thinking_budget"
    assert error(client, thinking_budget=-1).param == "thinking_budget"
    assert error(client, thinking_budget=1e300).param == "thinking_budget"
    with served.client() as plain:  # whose model marks no reasoning
        assert "the marks of this model's reasoning are not known" in error(plain, thinking_token_budget=1).message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="everbatch", prompt="x", extra_body={"thinking_budget": 1})


def test_whether_to_think_is_a_variable_of_the_template(client: openai.OpenAI, triton: FakeTriton) -> None:
    for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        client.chat.completions.create(model="everbatch", messages=says("say x"), extra_body=fields)
        assert triton.last().body["chat_template_kwargs"] == {"enable_thinking": False}
    client.chat.completions.create(model="everbatch", messages=says("say x"), reasoning_effort="low")
    assert triton.last().body["chat_template_kwargs"] == {"reasoning_effort": "low"}


class Sum(BaseModel):
    a: int


def test_a_parsed_answer_stands_behind_its_reasoning(client: openai.OpenAI, triton: FakeTriton) -> None:
    said = says('say <think>Hm {"a": 0}</think>{"a": 1}')
    reply = client.chat.completions.parse(model="everbatch", messages=said, response_format=Sum)
    assert reply.choices[0].message.parsed == Sum(a=1)
    assert triton.last().body["guide"]["type"] == "json_schema" and "reasoning" in triton.last().body


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_the_model_s_format_stand_behind_its_reasoning(
    stream: bool, client: openai.OpenAI, triton: FakeTriton
) -> None:
    values: Any = {"model": "everbatch", "messages": says(f"say <think>Hm</think>\n{CALL}"), "tools": [ADD]}
    if stream:
        with client.chat.completions.stream(**values) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**values).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", "{}") and not message.content
    body = triton.last().body
    assert body["visible_tokens"] == ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"]
    tag = json.loads(body["guide"]["text"])
    assert tag["triggers"] == ["[TOOL_CALLS]"]
    assert tag["group"] == {"begin": "[TOOL_CALLS][", "separator": ", ", "end": "]"}
    response = client.responses.create(
        model="everbatch", input=f"say <think>Hm</think>{CALL}", tools=[OWN_ADD], tool_choice="required"
    )
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert json.loads(triton.last().body["guide"]["text"])["free_text"] is False


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_format_can_be_asked_for(
    name: str, serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    format = TOOL_FORMATS[name].format
    reasoning = "harmony" if name == "harmony" else "none"
    with serve(tool_format=name, reasoning_format=reasoning) as served, served.client() as client:
        for choice in ("auto", "required"):
            client.chat.completions.create(
                model="everbatch",
                messages=says("say x"),
                tools=[ADD],
                tool_choice=choice,  # type: ignore[call-overload]
            )
            body = triton.last().body
            assert ("guide" in body) == (choice == "required" or bool(format.trigger))
            assert set(format.special) <= set(body["visible_tokens"])
            if name == "harmony":
                expected = "<|start|>assistant" + ("" if choice == "required" else "<|channel|>final<|message|>")
                assert body["reasoning"]["follow"] == expected
