"""Filling in the middle: llama-server's /infill, and `suffix` of completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from gateway.infill import InfillWriter
from gateway.infill_messages import InfillRequest
from gateway.triton_client import Piece, PromptReport, Usage
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.test_leaving import eventually_idle
from tests.gateway.test_limits import connect, post

STROKE = {"input_prefix": "def f(", "input_suffix": "\n", "prompt": "a", "n_predict": 8}


def test_a_stroke_is_asked_for_and_answered_in_llama_servers_words(served: Served, triton: FakeTriton) -> None:
    extra = [{"text": "x = 1", "filename": "a.py", "time": [1, 2]}, {"text": "y"}]
    more = {"id_slot": 0, "samplers": ["top_k", "infill"], "t_max_prompt_ms": 500, "cache_prompt": True, "seed": -1}
    status, body, headers = served.request("POST", "/infill", {**STROKE, "input_extra": extra, "top_k": 40, **more})
    seen = triton.last().body
    files = [{"text": "x = 1", "path": "a.py"}, {"text": "y"}]
    assert seen["fill"] == {"prefix": "def f(a", "suffix": "\n", "files": files}
    assert (seen["max_tokens"], seen["top_k"], "seed" in seen) == (8, 40, False)
    assert status == 200 and body["content"] == "".join(WORDS) and body["stop"] is True
    assert (body["stop_type"], body["stopping_word"], body["truncated"], body["model"]) == (
        "eos",
        "",
        False,
        "everbatch",
    )
    assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == body["tokens_evaluated"] > 0
    assert body["timings"]["predicted_n"] == body["tokens_predicted"] == len(WORDS)
    assert {"id_slot", "samplers", "t_max_prompt_ms"} <= set(headers["x-everbatch-ignored"].split(", "))


def test_a_stream_ends_with_the_event_that_stops_and_no_other(served: Served) -> None:
    _, text, _ = served.request("POST", "/infill", {**STROKE, "stream": True, "return_tokens": True})
    events = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == "".join(WORDS)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert sum(len(event["tokens"]) for event in events) == len(WORDS) and "timings" in events[-1]


@pytest.mark.parametrize(
    ("text", "content"), [("say a = 1\nb = 2\nc = 3", "a = 1\nb"), ("say no line break", "no line break")]
)
def test_an_answer_with_a_line_break_ends_when_its_time_is_over(
    text: str, content: str, served: Served, triton: FakeTriton
) -> None:
    _, body, _ = served.request("POST", "/infill", {"input_prefix": text, "t_max_predict_ms": 0})
    assert body["content"] == content and body["stop_type"] == ("limit" if "\n" in text else "eos")
    assert triton.last().ended.wait(10) and eventually_idle(served)


def test_only_the_fields_are_told_that_are_asked_for(served: Served) -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/n_ctx", "content/x", "nothing"]
    _, body, _ = served.request("POST", "/infill", {**STROKE, "response_fields": fields})
    assert body == {"content": "".join(WORDS), "timings/predicted_n": len(WORDS), "generation_settings/n_ctx": 2048}


@pytest.mark.parametrize(
    ("prefix", "stop_type", "word"), [("full", "limit", ""), ("stopped by STOP", "word", "STOP"), ("x", "eos", "")]
)
def test_the_reason_is_told(prefix: str, stop_type: str, word: str, served: Served) -> None:
    _, body, _ = served.request("POST", "/infill", {"input_prefix": prefix})
    assert (body["stop_type"], body["stopping_word"]) == (stop_type, word)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stroke_whose_client_has_left_for_the_next_one_ends(stream: bool, served: Served, triton: FakeTriton) -> None:
    with connect(served) as connection:
        connection.sendall(post(json.dumps({"input_prefix": "hold", "stream": stream}).encode(), "/infill"))
        (seen,) = triton.wait_for(1)
    assert seen.ended.wait(10) and seen.was_stopped
    assert served.request("POST", "/infill", {"input_prefix": "x"})[0] == 200
    assert eventually_idle(served)


@pytest.mark.parametrize(("left_out", "truncated"), [(0, False), (2, True)])
def test_files_that_did_not_fit_are_told(left_out: int, truncated: bool) -> None:
    writer = InfillWriter(InfillRequest(input_prefix="a"), None)
    writer.take(Piece(text="b", token_ids=[5], prompt=PromptReport(9, 4, None, left_out)))
    writer.take(Piece(finish_reason="stop", usage=Usage(9, 1, 4)))
    body = writer.body("b")
    assert body["truncated"] is truncated and "n_ctx" not in body["generation_settings"]
    assert (body["timings"]["cache_n"], body["timings"]["prompt_n"], body["tokens_cached"]) == (4, 5, 10)


def test_a_suffix_of_completions_fills_in_and_an_empty_one_is_none(client: openai.OpenAI, triton: FakeTriton) -> None:
    given: Any = {"model": "everbatch", "prompt": ["a", "b"]}
    assert len(client.completions.create(**given, suffix="z").choices) == 2
    asked = sorted((seen.body["fill"] for seen in triton.requests[-2:]), key=lambda fill: fill["prefix"])
    assert asked == [{"prefix": one, "suffix": "z"} for one in "ab"], "side by side, in either order"
    client.completions.create(**given, suffix="")
    assert all("fill" not in seen.body for seen in triton.requests[-2:])


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt": [5, 6]}, "prompt"), ({"prompt": [[5]]}, "prompt"), ({"echo": True}, "echo")]
)
def test_a_suffix_goes_with_a_text_and_without_echo(fields: dict[str, Any], param: str, served: Served) -> None:
    body = {"model": "everbatch", "prompt": "a", "suffix": "z", **fields}
    status, answer, _ = served.request("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == param


def test_a_model_without_the_tokens_is_named_with_the_remedy(
    serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    has, triton.capabilities = triton.capabilities, ["completion"]
    try:
        with serve() as served:
            for path, body, param in (
                ("/infill", STROKE, "input_suffix"),
                ("/v1/completions", {"model": "everbatch", "prompt": "a", "suffix": "z"}, "suffix"),
            ):
                status, answer, _ = served.request("POST", path, body)
                assert status == 400 and answer["error"]["param"] == param
                assert "name a model whose capabilities in /v1/models have fim" in answer["error"]["message"]
    finally:
        triton.capabilities = has


def test_models_tell_their_capabilities(served: Served) -> None:
    _, body, _ = served.request("GET", "/v1/models")
    assert body["data"][0]["capabilities"] == ["completion", "chat", "tools", "fim"]
