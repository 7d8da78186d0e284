"""The OpenAI-compatible endpoint before a real server: the openai package, the default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.wire import CANCELLED, eventually, num_cancelled, reaches, settled
from tests.gateway.conftest import Served, serving
from tests.gateway.test_limits import connect, post

pytestmark = pytest.mark.feature("W-11")
CHAT: Any = [{"role": "user", "content": "Write the function read_lines."}]
GREEDY: Any = {"model": "everbatch", "temperature": 0}
ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"


def streamed(client: openai.OpenAI, **values: Any) -> tuple[str, str | None, Any]:
    """Text, finish reason, usage of a streamed chat."""
    text, reason, usage = "", None, None
    for chunk in client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **values
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_a_streamed_chat_is_the_same_as_a_whole_one(sampling: Any, client: openai.OpenAI) -> None:
    values = {"model": "everbatch", "max_completion_tokens": 40, **sampling}
    whole = client.chat.completions.create(messages=CHAT, **values)
    text, reason, usage = streamed(client, **values)
    assert text and (text, reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert whole.usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_exactly_max_tokens_are_generated_where_the_end_is_ignored(client: openai.OpenAI) -> None:
    reply = client.completions.create(**GREEDY, prompt="def main(", max_tokens=33, extra_body={"ignore_eos": True})
    assert reply.usage is not None and reply.usage.completion_tokens == 33
    assert reply.choices[0].finish_reason == "length"


def test_ids_and_lists_of_prompts_get_the_replies_of_single_ones(client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    together = client.completions.create(**GREEDY, prompt=prompts, n=2, max_tokens=8)
    alone = [client.completions.create(**GREEDY, prompt=ids, max_tokens=8).choices[0].text for ids in prompts]
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_choices_are_sequences_of_one_request_streamed_or_not(client: openai.OpenAI) -> None:
    """The first one has the seed's own random stream, so that it is what the seed alone gives."""
    values: Any = {"model": "everbatch", "messages": CHAT, "max_tokens": 24, "temperature": 1.0, "seed": 7}
    several = client.chat.completions.create(**values, n=3)
    texts = [choice.message.content for choice in several.choices]
    alone = client.chat.completions.create(**values)
    assert texts[0] == alone.choices[0].message.content and len(set(texts)) == 3
    assert several.usage is not None and alone.usage is not None
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**values, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_best_of_returns_the_most_likely_and_counts_them_all(client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "prompt": "def main(", "max_tokens": 6, "seed": 7, "logprobs": 0}
    four = client.completions.create(**values, n=4, extra_body={"ignore_eos": True})
    best = client.completions.create(**values, n=2, best_of=4, extra_body={"ignore_eos": True})

    def likelihood(choice: Any) -> float:
        return -sum(choice.logprobs.token_logprobs)

    assert [choice.text for choice in best.choices] == [
        choice.text for choice in sorted(four.choices, key=likelihood)[:2]
    ]
    assert four.usage is not None and best.usage is not None
    assert best.usage.completion_tokens == four.usage.completion_tokens == 24
    with pytest.raises(openai.BadRequestError) as caught:
        list(client.completions.create(**values, n=2, best_of=4, stream=True))
    assert caught.value.param == "best_of"


def test_beams_are_ranked_and_one_beam_is_greedy(client: openai.OpenAI) -> None:
    values: Any = {"model": "everbatch", "prompt": "def main(", "max_tokens": 6, "logprobs": 0}
    beams: Any = {"use_beam_search": True, "length_penalty": 0, "ignore_eos": True}
    found = client.completions.create(**values, n=3, best_of=4, extra_body=beams).choices
    sums = [sum(choice.logprobs.token_logprobs) for choice in found if choice.logprobs]
    assert len({choice.text for choice in found}) == 3 and sums == sorted(sums, reverse=True)
    one = client.completions.create(**values, extra_body=beams).choices[0]
    greedy = client.completions.create(**values, temperature=0, extra_body={"ignore_eos": True}).choices[0]
    assert one.text == greedy.text and greedy.logprobs is not None
    assert sums[0] >= sum(greedy.logprobs.token_logprobs)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**values, n=100, extra_body=beams)
    assert caught.value.param == "n"


def test_a_stop_string_ends_the_reply_and_is_not_in_it(client: openai.OpenAI) -> None:
    full = client.completions.create(**GREEDY, prompt="def main(", max_tokens=30).choices[0].text
    stop = full[8:12]
    for stream in (False, True):
        reply: Any = client.completions.create(**GREEDY, prompt="def main(", max_tokens=30, stop=stop, stream=stream)
        parts = [choice for part in (reply if stream else [reply]) for choice in part.choices]
        assert "".join(part.text for part in parts) == full[: full.index(stop)]
        assert parts[-1].finish_reason == "stop"


def test_logprobs_name_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert text.startswith(reply.choices[0].message.content or "-")
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob, "greedy: the chosen one is the most likely"


def test_tokens_are_those_that_the_model_reads_and_become_the_text_again(served: Served, client: openai.OpenAI) -> None:
    text = "def read_lines(self, file):"
    _, found, _ = served.request("POST", "/tokenize", {"model": "everbatch", "prompt": text})
    by_text, by_ids = (
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=8) for prompt in (text, found["tokens"])
    )
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage is not None and by_text.usage.prompt_tokens == found["count"] == len(found["tokens"])
    _, back, _ = served.request("POST", "/detokenize", {"model": "everbatch", "tokens": found["tokens"]})
    assert back == {"prompt": text}
    _, chat, _ = served.request("POST", "/tokenize", {"model": "everbatch", "messages": CHAT})
    reply = client.chat.completions.create(**GREEDY, messages=CHAT, max_completion_tokens=1)
    assert reply.usage is not None and reply.usage.prompt_tokens == chat["count"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("with_keys", [True, False])
def test_the_second_turn_of_a_conversation_finds_the_kv_of_the_first(with_keys: bool, server: Any, keys: Path) -> None:
    """Of a tenant, and where nobody has a key: the programs of one machine are one party."""
    asked = f"Write the function read_lines{with_keys}. " * 30
    with serving(server.grpc_url, api_keys=keys if with_keys else None) as served, served.client(ALICE) as client:
        first = client.responses.create(**GREEDY, input=asked, max_output_tokens=60)
        second = client.responses.create(
            **GREEDY, input="Now one that writes.", previous_response_id=first.id, max_output_tokens=5
        )
        chat: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": first.output_text}]
        again = client.chat.completions.create(
            **GREEDY, messages=[*chat, {"role": "user", "content": "Now one that writes."}], max_tokens=5
        )
    assert first.usage is not None and second.usage is not None
    before = first.usage.input_tokens
    assert second.usage.input_tokens > before and second.usage.input_tokens_details.cached_tokens >= before - 32
    assert again.choices[0].message.content == second.output_text


def test_strangers_behind_a_proxy_are_told_nothing_of_the_cache(server: Any) -> None:
    prompt = "def strangers(" + "argument, " * 40
    with serving(server.grpc_url) as served, served.client() as client:
        usages = [
            client.completions.create(
                **GREEDY, prompt=prompt, max_tokens=2, extra_headers={"X-Forwarded-For": f"10.0.0.{i}"}
            ).usage
            for i in range(2)
        ]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [detail.cached_tokens for detail in details if detail is not None] == [0, 0]


def test_tenants_find_nothing_of_each_other_in_the_cache(server: Any, keys: Path) -> None:
    prompt = "def tenants(" + "argument, " * 40
    cached = []
    with serving(server.grpc_url, api_keys=keys) as served:
        for key in (ALICE, BOB, ALICE):
            with served.client(key) as client:
                usage = client.completions.create(**GREEDY, prompt=prompt, max_tokens=2).usage
                assert usage is not None and usage.prompt_tokens_details is not None
                cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] is not None and cached[2] > 0


def test_a_client_that_leaves_frees_its_place_in_the_batch(server: Any, served: Served) -> None:
    before = num_cancelled(server.metrics_url)
    body = {"model": "everbatch", "prompt": "def main(", "max_tokens": 1800, "stream": True, "ignore_eos": True}
    with connect(served) as connection:
        connection.sendall(post(json.dumps(body).encode()))
        assert b" 200 " in connection.recv(1000)
    assert reaches(server.metrics_url, CANCELLED, before + 1)
    assert eventually(lambda: served.gateway.running.choices == 0, 30)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt": [1 << 30]}, None),
        ({"prompt": [5] * 100_000}, None),
        ({"prompt": "a", "logit_bias": {"999999999": 1}}, "logit_bias"),
    ],
)
def test_what_the_server_refuses_is_a_400(values: Any, param: str | None, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="everbatch", **values)
    assert param is None or caught.value.param == param


def test_health_and_metrics_are_tritons(server: Any, served: Served, client: openai.OpenAI) -> None:
    assert served.request("GET", "/health")[0] == 200
    client.completions.create(**GREEDY, prompt="def main(", max_tokens=3)
    settled(server.metrics_url)
    page = served.request("GET", "/metrics")[1]
    assert "everbatch_requests" in page and "everbatch_gateway_completion_tokens_total" in page
