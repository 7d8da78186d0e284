"""Anthropic's Messages API before a real server: its package, the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.gateway.agent_session import SESSION
from tests.gateway.conftest import Served

pytestmark = pytest.mark.feature("W-11")
CHAT: Any = [{"role": "user", "content": "Write the function read_lines."}]
GREEDY: Any = {"model": "everbatch", "extra_body": {"temperature": 0}}
MARK: Any = {"type": "ephemeral"}


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def streamed(claude: anthropic.Anthropic, **values: Any) -> anthropic.types.Message:
    with claude.messages.stream(**values) as events:
        return events.get_final_message()


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached


def test_an_answer_has_the_text_and_the_tokens_of_a_chat_streamed_or_not(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    chat = client.chat.completions.create(model="everbatch", temperature=0, messages=CHAT, max_tokens=40)
    counted = claude.messages.count_tokens(model="everbatch", messages=CHAT).input_tokens
    assert chat.usage is not None
    for ask in (claude.messages.create, lambda **values: streamed(claude, **values)):
        message = ask(**GREEDY, messages=CHAT, max_tokens=40)
        assert text_of(message) == (chat.choices[0].message.content or "").rstrip("\n") or text_of(message) == (
            chat.choices[0].message.content
        )
        assert prompt_tokens(message.usage) == counted == chat.usage.prompt_tokens
        assert message.usage.output_tokens == chat.usage.completion_tokens
        assert message.stop_reason == ("max_tokens" if chat.choices[0].finish_reason == "length" else "end_turn")


def test_the_first_event_tells_what_was_found_in_the_cache_and_the_last_one_agrees(
    claude: anthropic.Anthropic,
) -> None:
    asked: Any = [{"role": "user", "content": "Write the function cached_lines. " * 30}]
    claude.messages.create(**GREEDY, messages=asked, max_tokens=1)
    with claude.messages.stream(**GREEDY, messages=asked, max_tokens=3, cache_control=MARK) as events:
        begun = next(event.message.usage for event in events if event.type == "message_start")
        end = events.get_final_message().usage
    assert begun.cache_read_input_tokens == end.cache_read_input_tokens != 0
    assert (
        begun.cache_creation_input_tokens
        == end.cache_creation_input_tokens
        == prompt_tokens(end) - (end.cache_read_input_tokens or 0)
    )
    assert begun.input_tokens == end.input_tokens == 0


def test_the_next_turn_reads_the_kv_of_the_one_before_from_the_cache(claude: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "Write the function turns. " * 30}]}]
    before = 0
    for number in range(3):
        message = streamed(claude, **GREEDY, system="Be brief.", messages=turns, max_tokens=30)
        usage = message.usage
        assert (usage.cache_read_input_tokens or 0) >= before - 32 and (before > 0) == (number > 0)
        before = prompt_tokens(usage) + usage.output_tokens
        turns += [{"role": "assistant", "content": message.content}, *CHAT]


def test_a_stop_sequence_ends_the_answer_and_is_told(claude: anthropic.Anthropic) -> None:
    text = text_of(claude.messages.create(**GREEDY, messages=CHAT, max_tokens=30))
    stop = text[8:12]
    for ask in (claude.messages.create, lambda **values: streamed(claude, **values)):
        message = ask(**GREEDY, messages=CHAT, max_tokens=30, stop_sequences=["nowhere", stop])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert text_of(message) == text[: text.index(stop)]


def test_an_answer_goes_on_from_its_beginning(claude: anthropic.Anthropic) -> None:
    text = text_of(claude.messages.create(**GREEDY, messages=CHAT, max_tokens=24))
    begun: Any = [*CHAT, {"role": "assistant", "content": text[:10].rstrip()}]
    rest = text_of(claude.messages.create(**GREEDY, messages=begun, max_tokens=4))
    assert rest and not text.startswith(rest), "it does not begin again"


def test_tools_of_an_agent_can_be_called_and_their_input_has_the_form(claude: anthropic.Anthropic) -> None:
    """Any model writes input of the form where a tool has to be called; this one knows no tools."""
    tools = [tool for tool in SESSION["agent"]["request"]["tools"] if tool["name"] in ("Bash", "TodoWrite", "WebFetch")]
    for tool in tools:
        chosen: Any = {"type": "tool", "name": tool["name"]}
        message = claude.messages.create(**GREEDY, messages=CHAT, max_tokens=300, tools=tools, tool_choice=chosen)
        if message.stop_reason == "max_tokens":  # it writes on in a text of the input
            continue
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.name == tool["name"] and message.stop_reason == "tool_use"
        jsonschema.validate(call.input, tool["input_schema"])


def test_all_tools_of_an_agent_are_taken_at_once(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        **GREEDY, messages=CHAT, max_tokens=4, tools=SESSION["agent"]["request"]["tools"], tool_choice={"type": "auto"}
    )
    assert message.usage.output_tokens > 0


def test_no_tokens_warm_the_cache(claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Write the function warm. " * 30}]
    warmed = claude.messages.create(**GREEDY, messages=asked, max_tokens=0, cache_control=MARK)
    assert (warmed.content, warmed.usage.output_tokens) == ([], 0)
    found = claude.messages.create(**GREEDY, messages=asked, max_tokens=1, cache_control=MARK).usage
    assert (found.cache_read_input_tokens or 0) >= prompt_tokens(warmed.usage) - 32
