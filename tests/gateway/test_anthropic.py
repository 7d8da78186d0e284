"""/v1/messages as Anthropic's own client uses it, streamed and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton

HELLO: Any = [{"role": "user", "content": "Say hello."}]
TEXT = "".join(WORDS)
CACHED: Any = {"type": "ephemeral"}
TOOLS: Any = [
    {"name": name, "description": f"Does {name}", "input_schema": {"type": "object", "properties": {"a": {}}}}
    for name in ("look", "ask")
]
CALLS = "".join(f'<tool_call>{{"name": "{tool["name"]}", "arguments": {{"a": 1}}}}</tool_call>\n' for tool in TOOLS)
pytestmark = pytest.mark.feature("W-11")


def say(text: str) -> Any:
    return [{"role": "user", "content": f"say {text}"}]


def ask(claude: anthropic.Anthropic, stream: bool, **values: Any) -> anthropic.types.Message:
    values = {"model": "everbatch", "max_tokens": 100, "messages": HELLO, **values}
    if not stream:
        return claude.messages.create(**values)
    with claude.messages.stream(**values) as events:
        return events.get_final_message()


def turns(triton: FakeTriton) -> Any:
    return triton.last().body["messages"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_message_with_its_text_and_usage(stream: bool, claude: anthropic.Anthropic) -> None:
    message = ask(claude, stream)
    assert (message.role, message.type, message.model, message.id[:4]) == ("assistant", "message", "everbatch", "msg_")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", TEXT)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 3, 0)
    assert usage.output_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "marked",
    [
        {"cache_control": CACHED},
        {"system": [{"type": "text", "text": "a", "cache_control": CACHED}]},
        {"tools": [TOOLS[0], {**TOOLS[1], "cache_control": {**CACHED, "ttl": "1h"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": CACHED}]}]},
    ],
)
def test_computed_tokens_were_written_to_the_cache_where_the_client_asks_for_one(
    marked: Any, stream: bool, claude: anthropic.Anthropic
) -> None:
    usage = ask(claude, stream, **marked).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 3, 4)


def test_a_stream_has_the_events_of_the_api_in_their_order(claude: anthropic.Anthropic) -> None:
    raw = claude.messages.with_raw_response.create(
        model="everbatch", max_tokens=100, messages=say(f"Hm. {CALLS}"), tools=TOOLS, stream=True
    )
    assert raw.http_response.headers["content-type"].startswith("text/event-stream")
    blocks = [part.split("\n") for part in raw.http_response.read().decode().split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert (started["usage"]["input_tokens"], started["usage"]["cache_read_input_tokens"]) == (4, 3)
    order = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events[2:-2]]
    assert list(dict.fromkeys(order)) == [(kind, i) for i in range(3) for kind in ("start", "delta", "stop")]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0 and events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_blocks_behind_the_text_and_white_space_between_them_is_none(
    stream: bool, claude: anthropic.Anthropic
) -> None:
    message = ask(claude, stream, messages=say(f"Hm. \n{CALLS}"), tools=TOOLS)
    text, *calls = message.content
    assert text.type == "text" and text.text == "Hm."
    assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [
        ("look", {"a": 1}),
        ("ask", {"a": 1}),
    ]
    assert message.stop_reason == "tool_use" and len({call.id for call in calls if call.type == "tool_use"}) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [" a \n b ", "a\n", CALLS[:20] + " "])
def test_white_space_of_the_text_itself_is_kept(text: str, stream: bool, claude: anthropic.Anthropic) -> None:
    (block,) = ask(claude, stream, messages=say(text), tools=TOOLS).content
    assert block.type == "text" and block.text == text


def test_without_tools_what_looks_like_a_call_is_text(claude: anthropic.Anthropic) -> None:
    (block,) = ask(claude, False, messages=say(CALLS)).content
    assert block.type == "text" and block.text == CALLS


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto"}, {"triggers": ["<tool_call>"]}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"triggers": ["<tool_call>"], "at_most_one": True}),
        ({"type": "any"}, {"free_text": False}),
        ({"type": "tool", "name": "ask"}, {"free_text": False}),
    ],
)
def test_the_choice_of_a_tool_guides_the_answer(
    choice: Any, sent: Any, claude: anthropic.Anthropic, triton: FakeTriton
) -> None:
    ask(claude, False, tools=TOOLS, tool_choice=choice)
    guide = json.loads(triton.last().body["guide"]["text"])
    schemas = guide.pop("structures")
    assert guide == {"type": "structural_tag", **sent}
    assert len(schemas) == (1 if choice["type"] == "tool" else 2)
    assert [tool["function"]["name"] for tool in triton.last().body["tools"]] == ["look", "ask"]
    assert triton.last().body["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]


def test_no_tool_is_shown_where_none_may_be_used(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    ask(claude, False, tools=TOOLS, tool_choice={"type": "none"})
    assert not {"tools", "guide"} & triton.last().body.keys()


def test_a_conversation_becomes_the_turns_of_a_chat(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    answer = ask(claude, False, messages=say(f"Hm.{CALLS}"), tools=TOOLS)
    ids = [block.id for block in answer.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": "one"},
        {
            "type": "tool_result",
            "tool_use_id": ids[1],
            "is_error": True,
            "content": [{"type": "text", "text": "two", "cache_control": CACHED}, {"type": "text", "text": "three"}],
        },
        {"type": "tool_result", "tool_use_id": "x"},
        {"type": "text", "text": "Go on."},
    ]
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "C"}]}
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, found]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *answer.content]},
        {"role": "user", "content": results},
    ]
    ask(claude, False, system=[{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}], messages=history)
    calls = [
        {"id": id, "type": "function", "function": {"name": tool["name"], "arguments": {"a": 1}}}
        for id, tool in zip(ids, TOOLS)
    ]
    assert turns(triton) == [
        {"role": "system", "content": "s1\n\ns2"},
        {"role": "user", "content": "a\n\nT\nS\nC\n\nc"},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "one", "tool_call_id": ids[0]},
        {"role": "tool", "content": "Error: two\n\nthree", "tool_call_id": ids[1]},
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "user", "content": "Go on."},
    ]


def test_an_answer_that_comes_last_is_continued(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    begun: Any = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "l"}]},
    ]
    ask(claude, False, messages=begun)
    assert triton.last().body["continue_final_message"] is True
    assert turns(triton)[-1] == {"role": "assistant", "content": "Hel"}
    ask(claude, False)
    assert "continue_final_message" not in triton.last().body


def test_system_turns_stay_where_they_are(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    late: Any = [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Be brief."}, *HELLO]
    ask(claude, False, system="Be kind.", messages=late)
    assert [turn["role"] for turn in turns(triton)] == ["system", "user", "assistant", "system", "user"]


def test_the_accounts_in_front_of_a_system_prompt_are_no_part_of_it(
    claude: anthropic.Anthropic, triton: FakeTriton
) -> None:
    accounts = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.50; cch=5af31;"}
    ask(claude, False, system=[accounts, {"type": "text", "text": "Be kind."}])
    assert turns(triton)[0] == {"role": "system", "content": "Be kind."}


def test_parameters_reach_the_model(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    claude.messages.create(
        model="everbatch",
        max_tokens=3,
        messages=HELLO,
        stop_sequences=["a", "b"],
        metadata={"user_id": "u"},
        service_tier="auto",
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "chat_template_kwargs": {"k": 1}},
    )
    body = triton.last().body
    assert json.loads(body.pop("guide")["text"]) == schema
    assert body == {
        "messages": HELLO,
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["a", "b"],
        "chat_template_kwargs": {"k": 1, "reasoning_effort": "low"},
        "tell_prompt": "counts",
        "timeout_s": 600.0,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "values", "reason"),
    [
        ("Say hello.", {"max_tokens": 2}, "max_tokens"),
        ("full", {}, "model_context_window_exceeded"),
        ("stopped by END", {"stop_sequences": ["END"]}, "stop_sequence"),
    ],
)
def test_the_reason_of_the_end_is_told(
    prompt: str, values: Any, reason: str, stream: bool, claude: anthropic.Anthropic
) -> None:
    message = ask(claude, stream, messages=[{"role": "user", "content": prompt}], **values)
    assert message.stop_reason == reason
    assert message.stop_sequence == ("END" if reason == "stop_sequence" else None)


def test_no_tokens_only_warm_the_cache(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    message = ask(claude, False, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert triton.last().body["max_tokens"] == 0


def test_tokens_are_counted_and_nothing_is_generated(claude: anthropic.Anthropic, triton: FakeTriton) -> None:
    found = claude.messages.count_tokens(model="everbatch", system="s", messages=HELLO, tools=TOOLS)
    assert found.input_tokens == 7
    body = triton.last().body
    assert body["tokenize"] is True and body["messages"][0] == {"role": "system", "content": "s"}
    assert len(body["tools"]) == 2 and "guide" not in body


def test_the_asynchronous_client_streams_too(served: Served) -> None:
    async def told() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=served.url, auth_token="none", max_retries=0) as client:
            async with client.messages.stream(model="everbatch", max_tokens=9, messages=HELLO) as events:
                text = "".join([part async for part in events.text_stream])
            whole = await client.messages.create(model="everbatch", max_tokens=9, messages=HELLO)
        (block,) = whole.content
        assert block.type == "text"
        return text, block.text

    assert asyncio.run(told()) == (TEXT, TEXT)


def test_both_clients_list_the_models(served: Served, claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == (
        "everbatch",
        "model",
        "everbatch",
        2048,
    )
    assert model.created_at.year > 2000 and claude.models.retrieve("everbatch").id == "everbatch"
    with served.client() as openais:
        assert [card.id for card in openais.models.list()] == ["everbatch"]
