"""/v1/completions as the openai package uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.logprobs import TextColumns, TokenLogProb, TopToken
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.test_limits import connect, post

TEXT = "".join(WORDS)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_text_or_ids_or_a_list_of_them(
    prompt: Any, sent: list[dict[str, Any]], stream: bool, client: openai.OpenAI, triton: FakeTriton
) -> None:
    texts = dict.fromkeys(range(len(sent)), "")
    reply: Any = client.completions.create(model="everbatch", prompt=prompt, seed=1, max_tokens=9, stream=stream)
    for part in reply if stream else [reply]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == dict.fromkeys(range(len(sent)), TEXT)
    given = [{key: value for key, value in seen.body.items() if "prompt" in key} for seen in triton.requests]
    assert sorted(given, key=str) == sorted(sent, key=str)


def test_two_prompts_with_n_are_counted_once_each(client: openai.OpenAI, triton: FakeTriton) -> None:
    reply = client.completions.create(model="everbatch", prompt=["a", "b"], n=2, max_tokens=9, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (14, 16)
    assert sorted((seen.body["prompt"], seen.body["n"], seen.body["seed"]) for seen in triton.requests) == [
        ("a", 2, 5),
        ("b", 2, 5),
    ]


def test_streamed_choices_of_two_prompts_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    """Those of the first prompt come first: its second one has the index 1, the first of the other prompt 2."""
    texts = dict.fromkeys(range(4), "")
    asked = {"model": "everbatch", "n": 2, "max_tokens": 9, "echo": True}
    for part in client.completions.create(**asked, prompt=["a ", "b "], stream=True):  # type: ignore[call-overload]
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == {0: "a " + TEXT, 1: "a " + TEXT, 2: "b " + TEXT, 3: "b " + TEXT}


def test_without_max_tokens_sixteen_are_asked_for(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.completions.create(model="everbatch", prompt="a")
    assert triton.last().body["max_tokens"] == 16


def test_a_reply_cut_at_max_tokens_says_length(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="everbatch", prompt="a", max_tokens=2)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (WORDS[0] + WORDS[1], "length")


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    assert client.completions.create(model="everbatch", prompt="then ", echo=True).choices[0].text == "then " + TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "ab"], [1, 2], [[1, 2], [3]]])
def test_a_prompt_is_scored_with_what_was_generated_behind_it(
    prompt: Any, max_tokens: int, stream: bool, served: Served, triton: FakeTriton
) -> None:
    """As lm-eval's local-completions and HELM ask, with each form of prompt. The fake's prompts begin with a token <s> that
    their text does not hold; those of ids have no text in it.
    """
    body = {"model": "everbatch", "prompt": prompt, "temperature": 0, "seed": 1234, "max_tokens": max_tokens}
    body |= {"echo": True, "logprobs": 1, "n": 2, "stream": stream, "stream_options": {"include_usage": True}}
    found, usage = scored_choices(served, body if stream else body | {"stream_options": None})
    num_prompts = (
        len(prompt) if isinstance(prompt[0], list) or (isinstance(prompt, list) and prompt == ["ab", "ab"]) else 1
    )
    assert sorted(found) == list(range(2 * num_prompts)) and usage["completion_tokens"] == 2 * num_prompts * max_tokens
    text = "ab" if "ab" in prompt else ""
    tokens = ["<s>", *text, *WORDS[:max_tokens]]
    logs = [None, *[-0.25] * len(text), *[-0.5] * max_tokens]
    for choice in found.values():
        assert choice["text"] == text + "".join(WORDS[:max_tokens]) and choice["finish_reason"] == "length"
        assert choice["tokens"] == tokens and choice["token_logprobs"] == logs
        assert choice["top_logprobs"][0] is None
        assert all(max(top.values()) >= -0.5 for top in choice["top_logprobs"][1:])
        assert choice["text_offset"] == [0, *(len("".join(tokens[1:i])) for i in range(1, len(tokens)))]
    assert {seen.body["max_tokens"] for seen in triton.requests} == {max_tokens}


def scored_choices(served: Served, body: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Each choice with its lists, put together where they came in several chunks; and the usage."""
    status, answer, _ = served.request("POST", "/v1/completions", body)
    assert status == 200, answer
    lines = answer.split("\n\n")[:-2] if body["stream"] else []
    parts = [json.loads(line.removeprefix("data: ")) for line in lines] or [answer]
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        one = found.setdefault(choice["index"], {"text": ""})
        one["text"] += choice["text"]
        one["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            one[name] = one.get(name, []) + values
    return found, parts[-1]["usage"]


def test_a_long_scored_prompt_is_streamed_in_slices(served: Served) -> None:
    """The first event has the text, so that clients which read no log-probabilities see it at once."""
    body = {"model": "everbatch", "prompt": "x" * 250, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": True}
    found, _ = scored_choices(served, body | {"stream_options": {"include_usage": True}})
    assert found[0]["text"] == "x" * 250 and found[0]["tokens"] == ["<s>", *"x" * 250]
    assert found[0]["text_offset"] == [0, *range(250)]
    events = served.request("POST", "/v1/completions", body)[1].split("\n\n")
    assert [len(json.loads(event[6:])["choices"][0]["text"]) for event in events[:3]] == [250, 0, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_logprobs_asks_for_no_scores(stream: bool, served: Served, triton: FakeTriton) -> None:
    body = {"model": "everbatch", "prompt": "then ", "max_tokens": 0, "echo": True, "stream": stream}
    _, answer, _ = served.request("POST", "/v1/completions", body)
    assert "then " in str(answer) and "prompt_logprobs" not in triton.last().body
    triton.requests.clear()
    served.request("POST", "/v1/completions", body | {"echo": False, "logprobs": 1})
    assert "prompt_logprobs" not in triton.last().body, "without echo the prompt is not told"


def test_of_tokens_with_the_same_text_the_likeliest_is_told() -> None:
    """lm-eval takes an answer for greedy when no other log-probability is greater: pieces of characters differ by their bytes."""
    others = [TopToken("", -0.5, [0xE2]), TopToken("a", -1.0, [97]), TopToken("a", -2.0, [97])]
    token = TokenLogProb("", -3.0, [0xF0], others)
    assert TextColumns()([token])["top_logprobs"] == [{"\\xe2": -0.5, "a": -1.0, "\\xf0": -3.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_four_lists_and_offsets_count_characters(stream: bool, client: openai.OpenAI) -> None:
    reply: Any = client.completions.create(model="everbatch", prompt="a", max_tokens=9, logprobs=2, stream=stream)
    parts = [part.choices[0].logprobs for part in (reply if stream else [reply]) if part.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == WORDS
    assert [value for part in parts for value in part.token_logprobs] == [-0.5] * 4
    offsets = [0, len(WORDS[0]), len(WORDS[0] + WORDS[1]), len(WORDS[0] + WORDS[1] + WORDS[2])]
    assert [offset for part in parts for offset in part.text_offset] == offsets
    assert parts[0].top_logprobs[0] == {WORDS[0]: -0.5, "a": -1.5}


def test_the_chosen_token_is_among_the_most_likely_even_when_none_is_asked_for(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="everbatch", prompt="a", max_tokens=1, logprobs=0).choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs == [{WORDS[0]: -0.5}]


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (3, 3), (3, 1)])
def test_best_of_that_asks_for_nothing_more_is_taken(n: int, best_of: int, client: openai.OpenAI) -> None:
    assert len(client.completions.create(model="everbatch", prompt="a", n=n, best_of=best_of).choices) == n


def test_what_best_of_leaves_out_is_counted_but_is_no_choice(client: openai.OpenAI, triton: FakeTriton) -> None:
    """Two replies of four tokens, and two more that the model discarded after 100 tokens each."""
    reply = client.completions.create(model="everbatch", prompt="a", n=2, best_of=4)
    assert (triton.last().body["n"], triton.last().body["best_of"], len(reply.choices)) == (2, 4, 2)
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 208)


def test_stream_ends_with_usage_and_done(served: Any) -> None:
    body = {"model": "everbatch", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    status, text, headers = served.request("POST", "/v1/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and '"total_tokens":11' in events[-3]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_event_is_an_http_chunk_of_its_own(path: str, usage: bool, served: Served) -> None:
    """perf_analyzer takes a chunk for a response, and genai-perf cannot read two completions in one."""
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {"model": "everbatch", "stream": True, "stream_options": {"include_usage": usage}, **prompt}
    with connect(served) as connection:
        connection.sendall(post(json.dumps(body).encode(), f"/v1/{path}", "Connection: close\r\n"))
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    chunks = list(http_chunks(data.partition(b"\r\n\r\n")[2]))
    assert chunks[-1] == b"data: [DONE]\n\n" and any(b'"finish_reason":"stop"' in chunk for chunk in chunks)
    assert all(chunk.startswith(b"data: ") and chunk.find(b"\n\n") == len(chunk) - 2 for chunk in chunks), chunks


def http_chunks(body: bytes) -> Iterator[bytes]:
    """The parts of a body in HTTP's chunked encoding, but for the empty last one."""
    size, _, rest = body.partition(b"\r\n")
    while length := int(size, 16):
        yield rest[:length]
        size, _, rest = rest[length + 2 :].partition(b"\r\n")


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
def test_the_offsets_of_each_streamed_choice_begin_at_zero(prompts: Any, client: openai.OpenAI) -> None:
    offsets: dict[int, list[int]] = {}
    for chunk in client.completions.create(
        model="everbatch", prompt=prompts, n=2, max_tokens=9, logprobs=0, stream=True
    ):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset or [])
    own = [len("".join(WORDS[:i])) for i in range(len(WORDS))]
    assert offsets == dict.fromkeys(range(2 if prompts == "a" else 4), own)
