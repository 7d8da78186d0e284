"""A recorded session of a coding agent with a model that reasons and calls several tools at once, played again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import pytest

from tests.gateway.agent_session import SESSION, agent_exchanges, replay, shown, side_exchanges
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

pytestmark = pytest.mark.feature("W-11")


@pytest.fixture
def claude(serve: Callable[..., AbstractContextManager[Served]]) -> Iterator[anthropic.Anthropic]:
    with serve(reasoning_format="think") as served:
        with anthropic.Anthropic(base_url=served.url, auth_token="none", max_retries=0, timeout=60) as client:
            yield client


def test_every_request_of_the_session_gets_its_recorded_answer(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    for request, said, answer in (*side_exchanges(), *agent_exchanges()):
        triton.script.append(said)
        message = replay(claude, request)
        assert shown(message.content) == shown(answer)
        last = answer[-1]["type"]
        assert message.stop_reason == ("tool_use" if last == "tool_use" else "end_turn")


def test_each_turn_s_prompt_goes_on_from_the_one_before(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    """So the KV of the turns before is found again: nothing that differs from request to request is in front of them."""
    before: list[Any] = []
    for request, said, _ in agent_exchanges():
        triton.script.append(said)
        replay(claude, request)
        body = triton.last().body
        turns = body["messages"]
        assert turns[: len(before)] == before and len(turns) > len(before)
        assert body["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}
        assert [tool["function"]["name"] for tool in body["tools"]] == [
            tool["name"] for tool in SESSION["agent"]["request"]["tools"]
        ]
        before = turns
    assert before[0]["role"] == "system" and "x-anthropic-billing-header" not in json.dumps(before)


def test_the_model_is_shown_reasoning_calls_and_results_of_the_turns_before(
    claude: anthropic.Anthropic, triton: FakeTriton
) -> None:
    *_, (request, said, _) = agent_exchanges()
    triton.script.append(said)
    replay(claude, request)
    turns = triton.last().body["messages"]
    roles = "system user assistant tool tool tool assistant tool assistant tool user assistant user assistant tool tool"
    assert [turn["role"] for turn in turns] == roles.split()
    first = turns[2]
    assert first["reasoning_content"].startswith("The user wants") and first["content"].startswith("I'll look")
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["Read", "Grep", "Read"]
    assert [call["id"] for call in first["tool_calls"]] == [turn["tool_call_id"] for turn in turns[3:6]]
    assert turns[5]["content"].startswith("Error: <tool_use_error>")


def test_its_budget_of_reasoning_reaches_a_model_whose_reasoning_is_known(
    claude: anthropic.Anthropic, triton: FakeTriton, served: Served
) -> None:
    request, said, _ = next(agent_exchanges())
    triton.script += [said, "Hm."]
    replay(claude, request)
    assert triton.last().body["reasoning"]["max_tokens"] == 31999
    with anthropic.Anthropic(base_url=served.url, auth_token="none", max_retries=0) as other:
        replay(other, request)
    assert "reasoning" not in triton.last().body, "the budget is passed over where no reasoning is told apart"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_where_it_is_switched_off_and_empty_where_it_is_omitted(
    stream: bool, claude: anthropic.Anthropic, triton: FakeTriton
) -> None:
    shown_blocks = []
    for thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}, {"type": "disabled"}):
        triton.script.append("<think>\nHm.\n</think>\n\nYes.")
        request: Any = {"model": "everbatch", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
        message = replay(claude, {**request, "thinking": thinking, "stream": stream})
        shown_blocks.append([(block["type"], block.get("thinking")) for block in shown(message.content)])
    assert shown_blocks == [
        [("thinking", "Hm."), ("text", None)],
        [("thinking", ""), ("text", None)],
        [("text", None)],
    ]
    assert triton.last().body["chat_template_kwargs"] == {"enable_thinking": False}
