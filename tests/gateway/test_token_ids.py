"""return_token_ids: the ids of an answer's tokens and of its prompt's, as vLLM's clients read them beside the text."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.fake_triton import PROMPT_IDS, WORDS, FakeTriton

HELLO: Any = [{"role": "user", "content": "Say hello."}]
ASKED: Any = {"model": "everbatch", "extra_body": {"return_token_ids": True}}
IDS = list(range(len(WORDS)))
pytestmark = pytest.mark.feature("W-11")


def test_a_chat_has_the_ids_of_each_choice_and_those_of_the_prompt(client: openai.OpenAI, triton: FakeTriton) -> None:
    told = client.chat.completions.create(**ASKED, messages=HELLO, n=2).to_dict()
    assert triton.last().body["tell_prompt"] == "token_ids"
    choices: Any = told["choices"]
    assert told["prompt_token_ids"] == PROMPT_IDS and [choice["token_ids"] for choice in choices] == [IDS, IDS]


def test_a_completion_has_both_in_each_choice(client: openai.OpenAI) -> None:
    for prompt in ([5, 6, 7], ["a", "b"]):
        choices: Any = client.completions.create(**ASKED, prompt=prompt).to_dict()["choices"]
        assert [choice["token_ids"] for choice in choices] == [IDS] * len(choices)
        assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT_IDS] * len(choices)


def test_chunks_of_a_chat_tell_each_id_once_and_the_first_one_the_prompt(client: openai.OpenAI) -> None:
    chunks: Any = [chunk.to_dict() for chunk in client.chat.completions.create(**ASKED, messages=HELLO, stream=True)]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == IDS
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT_IDS, *[None] * (len(chunks) - 1)]


def test_ids_of_what_is_held_back_come_with_the_call(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    say: Any = [{"role": "user", "content": f"say {call}"}]
    stream = client.chat.completions.create(**ASKED, messages=say, tools=tools, stream=True)
    told = [i for chunk in stream for i in chunk.to_dict()["choices"][0]["token_ids"]]  # type: ignore[index]
    assert told == list(range(-(-len(call) // 7)))


def test_chunks_of_completions_tell_the_prompt_of_each_choice(client: openai.OpenAI) -> None:
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    options: Any = {"stream_options": {"include_usage": True}, "stream": True}
    for chunk in client.completions.create(**ASKED, prompt="a", n=2, **options):
        for choice in chunk.choices:
            told: Any = choice.to_dict()
            ids[choice.index] += told["token_ids"]
            prompts += [told["prompt_token_ids"]] if "prompt_token_ids" in told else []
    assert ids == {0: IDS, 1: IDS} and prompts == [PROMPT_IDS, PROMPT_IDS]


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_is_told_ids_who_does_not_ask(stream: bool, client: openai.OpenAI, triton: FakeTriton) -> None:
    reply: Any = client.chat.completions.create(model="everbatch", messages=HELLO, stream=stream)
    chunks = [chunk.to_dict() for chunk in reply] if stream else [reply.to_dict()]
    assert all("token_ids" not in str(chunk) for chunk in chunks) and "tell_prompt" not in triton.last().body
