"""Reasoning with a budget, and calls behind it, through a real server whose model has their marks as special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deploy import chat_template
from deploy.gateway import GatewayOptions
from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.starts import wait_ready
from tests.e2e.thinking_model import make_model
from tests.gateway.conftest import Served, serving

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OWN_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
ASKED: Any = {"model": "everbatch", "messages": [{"role": "user", "content": "How warm is it?"}], "temperature": 0}
BUDGET = 12


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("thinking")
    with serve(directory / "run", f"model.path={make_model(directory / 'model')}") as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="module")
def thinking(thinking_server: TritonServer) -> Iterator[Served]:
    """The endpoint with the formats that the launcher finds in the chat template."""
    found = GatewayOptions(9000).with_formats_of(chat_template.source(thinking_server.config))
    assert (found.tool_format, found.reasoning_format) == ("mistral", "mistral")
    formats = {"tool_format": found.tool_format, "reasoning_format": found.reasoning_format}
    with serving(thinking_server.grpc_url, **formats) as served:
        served.wait_healthy()
        yield served


@pytest.fixture
def client(thinking: Served) -> Iterator[openai.OpenAI]:
    with thinking.client() as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_reasoning_and_a_call_follows_it(stream: bool, client: openai.OpenAI) -> None:
    values = {**ASKED, "tools": [TOOL], "tool_choice": "required", "extra_body": {"thinking_budget": BUDGET}}
    if stream:
        with client.chat.completions.stream(**values, stream_options={"include_usage": True}) as events:
            reply: Any = events.get_final_completion()
    else:
        reply = client.chat.completions.create(**values)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["unit"] in ("C", "F")
    assert not message.content and message.reasoning_content
    assert reply.usage.completion_tokens_details.reasoning_tokens == BUDGET + 1, "the mark at its end is one of them"
    turns = [*ASKED["messages"], message.model_dump(exclude_none=True, exclude={"parsed"})]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "20"}]
    for turn in turns[1]["tool_calls"]:
        turn["function"].pop("parsed_arguments", None)
    again = client.chat.completions.create(**{**ASKED, "messages": turns}, tools=[TOOL], max_tokens=3)
    assert again.usage is not None and again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_a_form_applies_behind_the_reasoning(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    reply: Any = client.chat.completions.create(**ASKED, response_format=format, extra_body={"thinking_budget": 0})
    assert json.loads(reply.choices[0].message.content)["unit"] in ("C", "F")
    assert not hasattr(reply.choices[0].message, "reasoning_content")
    off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_budget": 0}
    plain: Any = client.chat.completions.create(**ASKED, response_format=format, extra_body=off)
    assert json.loads(plain.choices[0].message.content)["unit"] in ("C", "F")
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_response_has_reasoning_and_the_call_as_items(client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "input": "How warm is it?", "temperature": 0, "tools": [OWN_TOOL]}
    with client.responses.stream(
        **values, tool_choice="required", extra_body={"max_reasoning_tokens": BUDGET}
    ) as events:
        response: Any = events.get_final_response()
    reasoning, call = response.output
    assert (reasoning.type, call.type, call.name) == ("reasoning", "function_call", "weather")
    assert reasoning.content[0].text and json.loads(call.arguments)["unit"] in ("C", "F")
    assert response.usage.output_tokens_details.reasoning_tokens == BUDGET + 1


def test_without_the_formats_the_marks_stay_hidden(thinking_server: TritonServer) -> None:
    with serving(thinking_server.grpc_url) as served, served.client() as client:
        served.wait_healthy()
        reply = client.chat.completions.create(**ASKED, max_tokens=8)
    assert "[THINK]" not in (reply.choices[0].message.content or "")
