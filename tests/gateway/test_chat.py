"""/v1/chat/completions as the openai package uses it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton

TEXT = "".join(WORDS)
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def test_a_reply_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="everbatch", messages=HELLO)
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == "everbatch"
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 4, 11)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_a_streamed_reply_is_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="everbatch", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", WORDS[0], WORDS[1] + WORDS[2], WORDS[3], None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_a_last_chunk(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="everbatch", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 11


def test_the_async_client_streams_side_by_side(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="everbatch", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(16)))

    assert asyncio.run(many()) == [TEXT] * 16


def test_n_replies_are_one_request_whose_prompt_is_counted_once(client: openai.OpenAI, triton: FakeTriton) -> None:
    reply = client.chat.completions.create(model="everbatch", messages=HELLO, n=3, seed=40)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(i, TEXT) for i in range(3)]
    assert [(seen.body["n"], seen.body["seed"]) for seen in triton.requests] == [(3, 40)]
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 12)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3, (
        "what was there before, not what the first one computed"
    )


def test_beams_are_asked_for_as_in_vllm(client: openai.OpenAI, triton: FakeTriton) -> None:
    beams = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    reply = client.chat.completions.create(model="everbatch", messages=HELLO, n=2, temperature=0, extra_body=beams)
    assert len(reply.choices) == 2
    assert {name: triton.last().body[name] for name in (*beams, "n")} == {**beams, "n": 2}


def test_streamed_choices_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    reasons = {}
    for chunk in client.chat.completions.create(model="everbatch", messages=HELLO, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), TEXT) and reasons == dict.fromkeys(range(3), "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_in_the_chat_shape(stream: bool, client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "everbatch", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        found = [
            token
            for chunk in client.chat.completions.create(**arguments, stream=True)
            if chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.content or []
        ]
    else:
        logprobs = client.chat.completions.create(**arguments).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        found = logprobs.content
    assert [token.token for token in found] == WORDS
    assert [bytes(token.bytes or []).decode() for token in found] == WORDS
    assert [[top.logprob for top in token.top_logprobs] for token in found] == [[-0.5, -1.5]] * 4


def test_every_sampling_parameter_reaches_the_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(
        model="everbatch",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        seed=-1,
        logit_bias={"5": -100},
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        max_completion_tokens=3,
        user="u",
        metadata={"k": "v"},
        store=True,
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "include_stop_str_in_output": True,
            "bad_words": ["no"],
        },
    )
    assert triton.last().body == {
        "messages": HELLO,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "stop": ["a", "b"],
        "include_stop_in_output": True,
        "stop_token_ids": [3],
        "bad_words": ["no"],
        "seed": (1 << 64) - 1,
        "logit_bias": {"5": -100.0},
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "max_tokens": 3,
        "timeout_s": 600.0,
    }


def test_what_is_not_said_is_not_sent(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(model="everbatch", messages=HELLO, n=1, stop=[])
    assert triton.last().body == {"messages": HELLO, "timeout_s": 600.0}


def test_all_tokens_are_asked_for_although_a_model_may_recommend_fewer(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    for given in (0, -1):
        client.chat.completions.create(model="everbatch", messages=HELLO, extra_body={"top_k": given})
        assert triton.last().body["top_k"] == 0


def test_top_p_of_zero_asks_for_the_most_likely_token(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.chat.completions.create(model="everbatch", messages=HELLO, top_p=0, extra_body={"top_k": 9})
    assert triton.last().body["top_k"] == 1 and "top_p" not in triton.last().body


def test_text_parts_are_joined_and_an_answer_may_be_sent_back_as_it_came(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    answer = client.chat.completions.create(model="everbatch", messages=HELLO).choices[0].message
    parts: Any = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    client.chat.completions.create(model="everbatch", messages=[parts, answer.model_dump(), HELLO[1]])  # type: ignore
    assert triton.last().body["messages"] == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": TEXT},
        HELLO[1],
    ]
