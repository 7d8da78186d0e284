"""Scores of prompts by the OpenAI-compatible endpoint before a real server, as lm-eval and HELM ask for them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import Served

pytestmark = pytest.mark.feature("W-11")
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return file.read()"
SCORED: Any = {"model": "everbatch", "temperature": 0, "echo": True, "seed": 1234}


def test_a_scored_prompt_has_the_log_probabilities_with_which_it_was_generated(client: openai.OpenAI) -> None:
    """What a greedy reply was generated with is what the same text scores when it is the prompt."""
    reply = client.completions.create(**SCORED, prompt=PROMPT, max_tokens=8, logprobs=2)
    first = reply.choices[0]
    again = client.completions.create(**SCORED, prompt=first.text, max_tokens=0, logprobs=2)
    scored = again.choices[0]
    assert first.logprobs is not None and scored.logprobs is not None and scored.text == first.text
    assert again.usage is not None and again.usage.completion_tokens == 0 and scored.finish_reason == "length"
    assert scored.logprobs.tokens == first.logprobs.tokens
    assert scored.logprobs.text_offset == first.logprobs.text_offset
    logs, expected = scored.logprobs.token_logprobs or [], first.logprobs.token_logprobs or []
    assert logs[0] is None and expected[0] is None
    assert logs[1:] == pytest.approx(expected[1:], abs=1e-4)
    for start, end, token in zip(
        scored.logprobs.text_offset or [], (scored.logprobs.text_offset or [])[1:], scored.logprobs.tokens or []
    ):
        assert scored.text[start:end] == token


def test_ids_lists_streams_and_choices_score_alike(client: openai.OpenAI, served: Served) -> None:
    ids = [[5, 6, 7, 8], [9, 10, 11]]
    alone = [
        client.completions.create(**SCORED, prompt=one, max_tokens=0, logprobs=1).choices[0].logprobs for one in ids
    ]
    together = client.completions.create(**SCORED, prompt=ids, n=2, max_tokens=0, logprobs=1)
    for choice in together.choices:
        expected = alone[choice.index // 2]
        assert choice.logprobs is not None and expected is not None
        assert choice.logprobs.tokens == expected.tokens and len(expected.tokens or []) == len(ids[choice.index // 2])
        assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx(
            (expected.token_logprobs or [])[1:], abs=1e-4
        )
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.completions.create(**SCORED, prompt=ids[0], n=2, max_tokens=2, logprobs=1, stream=True):
        for part in chunk.choices:
            if part.logprobs is not None:
                found[part.index] += part.logprobs.token_logprobs or []
    assert all(len(logs) == len(ids[0]) + 2 and logs[0] is None for logs in found.values())


def test_lm_evals_arithmetic_finds_a_greedy_continuation_greedy(client: openai.OpenAI) -> None:
    """lm-eval sends context and continuation as ids with max_tokens 1, and leaves out the last score."""
    context = [5, 6, 7, 8]
    told = client.completions.create(
        **SCORED, prompt=context, max_tokens=3, logprobs=1, extra_body={"ignore_eos": True}
    )
    top = told.choices[0].logprobs
    assert top is not None
    for logs, tops in zip((top.token_logprobs or [])[len(context) :], (top.top_logprobs or [])[len(context) :]):
        assert logs == max(tops.values())


def test_beams_have_no_scores_and_say_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="everbatch", prompt="a", echo=True, logprobs=0, n=2, extra_body={"use_beam_search": True}
        )
    assert caught.value.param == "logprobs"


def test_keys_of_the_chat_template_reach_the_model(client: openai.OpenAI) -> None:
    chat: Any = {"model": "everbatch", "temperature": 0, "max_tokens": 4}
    messages: Any = [{"role": "user", "content": "Write f."}, {"role": "assistant", "content": "def f("}]
    plain = client.chat.completions.create(**chat, messages=messages).usage
    continued = client.chat.completions.create(
        **chat, messages=messages, extra_body={"continue_final_message": True, "chat_template_kwargs": {"a": 1}}
    ).usage
    assert plain is not None and continued is not None and continued.prompt_tokens < plain.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat, messages=messages, extra_body={"chat_template_kwargs": {"messages": []}})
    assert caught.value.param == "chat_template_kwargs"
