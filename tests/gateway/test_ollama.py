"""Ollama's API, as its clients speak it; the packages themselves are asked in other_clients.py."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from gateway.ollama_messages import OllamaMessage
from gateway.ollama_routes import WIRE_VERSION
from gateway.ollama_turns import turns_of
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.pictures import png
from tests.gateway.test_leaving import eventually_idle
from tests.gateway.test_limits import connect, post

HELLO = "".join(WORDS)
CALL = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "everbatch", "messages": [{"role": "user", "content": text}], **more}


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_chat_streams_lines_and_the_last_one_has_counts_and_times(served: Served) -> None:
    status, text, headers = served.request("POST", "/api/chat", say("hi"))
    assert status == 200 and headers["content-type"] == "application/x-ndjson"
    *parts, last = lines(text)
    assert "".join(part["message"]["content"] for part in parts) == HELLO and not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"], last["load_duration"]) == (7, len(WORDS), 0)
    assert all(isinstance(last[name], int) for name in TIMES)
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", say("hi")), ("/api/generate", {"model": "everbatch:latest", "prompt": "hi"})],
)
def test_without_a_stream_the_answer_is_one_object(path: str, body: dict[str, Any], served: Served) -> None:
    _, answer, headers = served.request("POST", path, {**body, "stream": False})
    assert headers["content-type"] == "application/json" and answer["model"] == body["model"]
    told = answer["response"] if path == "/api/generate" else answer["message"]["content"]
    assert (told, answer["done"], answer["eval_count"]) == (HELLO, True, len(WORDS))


def test_options_are_sampling_fields_by_other_names(served: Served, triton: FakeTriton) -> None:
    options = {"num_predict": 3, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5}
    options |= {"presence_penalty": 1, "frequency_penalty": 0.5, "seed": 7, "stop": ["x"]}
    ignored = {"num_ctx": 4096, "num_gpu": 1, "use_mmap": True, "repeat_last_n": 64, "mirostat": 0}
    body = say("hi", options={**options, **ignored}, keep_alive="5m")
    status, text, headers = served.request("POST", "/api/chat", body)
    assert status == 200 and lines(text)[-1]["done_reason"] == "length"
    seen = triton.last().body
    assert {"max_tokens": 3, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}.items() <= seen.items()
    assert {"repetition_penalty": 1.5, "presence_penalty": 1, "seed": 7, "stop": ["x"]}.items() <= seen.items()
    assert set(headers["x-everbatch-ignored"].split(", ")) == {"keep_alive", *(f"options.{name}" for name in ignored)}
    served.request("POST", "/api/chat", say("hi", options={"num_predict": -2, "seed": -1}))
    assert not {"max_tokens", "seed"} & triton.last().body.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_an_object_of_arguments_and_its_result_finds_it(
    stream: bool, served: Served, triton: FakeTriton
) -> None:
    _, answer, _ = served.request("POST", "/api/chat", say(f"say {CALL}", tools=TOOLS, stream=stream))
    parts = lines(answer) if stream else [answer]
    (call,) = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert call["function"] == {"index": 0, "name": "look", "arguments": {"place": "here"}}
    back = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "look", "content": "nothing"}
    messages = [{"role": "user", "content": "a"}, back, result]
    assert served.request("POST", "/api/chat", say("", messages=messages, tools=TOOLS))[0] == 200
    called, answered = triton.last().body["messages"][1:]
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"place": "here"}}
    assert answered["tool_call_id"] == called["tool_calls"][0]["id"] == call["id"]


def test_results_without_ids_belong_to_the_calls_by_name_and_then_in_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": "", **more} for more in ({"tool_name": "b"}, {}, {}, {"tool_name": "z"})]
    given = [{"role": "assistant", "tool_calls": calls}, *results]
    called, *answered = turns_of([OllamaMessage.model_validate(one) for one in given])
    ids = [call["id"] for call in called["tool_calls"]]
    assert [turn.get("tool_call_id") for turn in answered] == [ids[1], ids[0], ids[2], None]
    assert len(set(ids)) == 3 and answered[-1]["name"] == "z"


@pytest.mark.parametrize(
    ("format", "guide"), [("json", {"type": "json"}), ({"type": "object"}, {"type": "json_schema"}), ("", None)]
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_format_guides_the_answer(format: Any, guide: Any, path: str, served: Served, triton: FakeTriton) -> None:
    body = say("hi") if path == "/api/chat" else {"model": "everbatch", "prompt": "hi", "raw": True}
    assert served.request("POST", path, {**body, "format": format})[0] == 200
    found = triton.last().body.get("guide")
    assert found is None if guide is None else guide.items() <= found.items()


def test_generate_is_a_chat_or_a_plain_prompt_or_fills_in(served: Served, triton: FakeTriton) -> None:
    def asked(**fields: Any) -> dict[str, Any]:
        status, answer, _ = served.request("POST", "/api/generate", {"model": "everbatch", "prompt": "p", **fields})
        assert status == 200, answer
        keys = ("messages", "prompt", "fill")
        return {key: value for key, value in triton.last().body.items() if key in keys}

    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    assert asked(system="s") == {"messages": turns} and asked() == {"messages": turns[1:]}
    assert asked(raw=True, system="s") == {"prompt": "p"}
    assert asked(suffix="z") == {"fill": {"prefix": "p", "suffix": "z"}}


def test_a_model_without_a_chat_template_gets_the_prompt_as_it_stands(
    serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    has, triton.capabilities = triton.capabilities, ["completion"]
    try:
        with serve() as served:
            served.request("POST", "/api/generate", {"model": "everbatch", "prompt": "p", "system": "s"})
            assert triton.last().body["prompt"] == "s\n\np"
            _, answer, _ = served.request("POST", "/api/generate", {"model": "everbatch", "prompt": "p", "suffix": "z"})
            assert "no tokens for filling in the middle" in answer["error"]
    finally:
        triton.capabilities = has


def test_images_are_base64_in_a_message_or_beside_a_prompt(
    serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    has, triton.takes_images = triton.takes_images, True
    image = base64.b64encode(png(2, 2)).decode()
    try:
        with serve() as served:
            turn = {"role": "user", "content": "see", "images": [image]}
            assert served.request("POST", "/api/chat", say("", messages=[turn]))[0] == 200
            of_chat = triton.last().body
            body = {"model": "everbatch", "prompt": "see", "images": [image]}
            assert served.request("POST", "/api/generate", body)[0] == 200
            assert triton.last().body["messages"] == of_chat["messages"]
            assert triton.last().body["images"] == of_chat["images"] == [image]
            assert served.request("POST", "/api/generate", {**body, "raw": True})[0] == 400
    finally:
        triton.takes_images = has


def test_reasoning_is_told_apart_and_switched(
    serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    with serve(reasoning_format="think") as served:
        body = say("say <think>so</think>yes", stream=False, think=True)
        _, answer, _ = served.request("POST", "/api/chat", body)
        assert (answer["message"]["thinking"], answer["message"]["content"]) == ("so", "yes")
        assert triton.last().body["chat_template_kwargs"] == {"enable_thinking": True}
        served.request("POST", "/api/chat", say("hi", think="low"))
        assert triton.last().body["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
        assert "thinking" in served.request("POST", "/api/show", {"model": "everbatch"})[1]["capabilities"]


def test_log_probabilities_are_those_of_the_tokens(served: Served) -> None:
    _, answer, _ = served.request("POST", "/api/chat", say("hi", logprobs=True, top_logprobs=1, stream=False))
    assert [one["token"] for one in answer["logprobs"]] == WORDS and "top_logprobs" in answer["logprobs"][0]


@pytest.mark.parametrize(("path", "key"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_without_anything_to_answer_the_model_is_only_looked_for(
    path: str, key: str, served: Served, triton: FakeTriton
) -> None:
    served.request("GET", "/api/ps")  # which has asked for the facts
    before = len(triton.requests)
    empty: Any = [] if key == "messages" else ""
    for body in ({"model": "everbatch"}, {"model": "everbatch", key: empty, "stream": False}):
        status, answer, _ = served.request("POST", path, body)
        (only,) = lines(answer) if isinstance(answer, str) else [answer]
        assert status == 200 and only["done"] and only["done_reason"] == "load"
    assert len(triton.requests) == before


def test_embeddings_of_a_text_or_several(served: Served) -> None:
    _, one, _ = served.request("POST", "/api/embed", {"model": "everbatch", "input": "abc", "truncate": True})
    assert one["embeddings"] == [[3.0, 0.5, -1.0]] and one["prompt_eval_count"] > 0
    _, two, _ = served.request("POST", "/api/embed", {"model": "everbatch", "input": ["a", "bc"]})
    assert [vector[0] for vector in two["embeddings"]] == [1.0, 2.0]
    assert served.request("POST", "/api/embed", {"model": "everbatch", "input": []})[1]["embeddings"] == []
    _, old, _ = served.request("POST", "/api/embeddings", {"model": "everbatch", "prompt": "abc"})
    assert old == {"embedding": [3.0, 0.5, -1.0]}


def test_the_models_that_are_there_are_listed_with_what_they_can_do(served: Served) -> None:
    assert served.request("GET", "/api/version")[1]["version"] == WIRE_VERSION
    (card,) = served.request("GET", "/api/tags")[1]["models"]
    (running,) = served.request("GET", "/api/ps")[1]["models"]
    assert card["model"] == running["name"] == "everbatch" and card["digest"] == running["digest"]
    assert running["context_length"] == 2048
    _, shown, _ = served.request("POST", "/api/show", {"name": "everbatch:latest"})
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert shown["model_info"]["everbatch.context_length"] == 2048 and ".Suffix" in shown["template"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/pull"), ("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/copy")]
    + [("DELETE", "/api/delete")],
)
def test_models_are_neither_fetched_nor_changed(method: str, path: str, served: Served) -> None:
    status, answer, _ = served.request(method, path, {"model": "llama3"} if method == "POST" else None)
    assert status == 400 and "started with its models" in answer["error"] and "everbatch" in answer["error"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/api/chat", {"model": "nope"}, 404, "there is no model 'nope'"),
        ("/api/chat", {"options": {"temprature": 1}}, 400, "options.temprature; did you mean temperature?"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat (Ollama) is 2"),
        ("/api/chat", {"think": True}, 400, "think is not served by the model 'everbatch'"),
        ("/api/chat", {"top_logprobs": 2}, 400, "top_logprobs needs logprobs: true"),
        ("/api/generate", {"prompt": "p", "template": "x"}, 400, "started with --chat-template FILE"),
        ("/api/generate", {"prompt": "p", "context": [1]}, 400, "send the whole conversation to /api/chat"),
        ("/api/generate", {"prompt": "error [INVALID_ARGUMENT] odd"}, 400, "odd"),
        ("/api/show", {"model": "nope"}, 404, "there is no model 'nope'"),
        ("/api/embed", {"input": 5}, 400, "input is 5"),
    ],
)
def test_an_error_is_one_sentence_under_error(
    path: str, fields: dict[str, Any], status: int, message: str, served: Served
) -> None:
    body = {**say("hi"), **fields} if path == "/api/chat" else {"model": "everbatch", **fields}
    found, answer, _ = served.request("POST", path, body)
    assert found == status and answer.keys() == {"error"} and message in answer["error"], answer


def test_an_error_in_a_stream_is_its_last_line(served: Served) -> None:
    status, text, _ = served.request("POST", "/api/chat", say("late error [UNAVAILABLE] engine died"))
    first, last = lines(text)
    assert status == 200 and first["message"]["content"] == " tick" and last == {"error": "engine died"}


def test_a_key_is_asked_for_where_the_server_has_keys(
    serve: Callable[..., AbstractContextManager[Served]], tmp_path: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me " + "k" * 32 + "\n")
    keys.chmod(0o600)
    with serve(api_keys=keys) as served:
        status, answer, _ = served.request("GET", "/api/tags")
        assert status == 401 and "Authorization: Bearer" in answer["error"]
        assert served.request("GET", "/api/tags", headers={"Authorization": "Bearer " + "k" * 32})[0] == 200


def test_a_client_that_leaves_ends_its_answer(served: Served, triton: FakeTriton) -> None:
    with connect(served) as connection:
        connection.sendall(post(json.dumps(say("hold")).encode(), "/api/chat"))
        (seen,) = triton.wait_for(1)
        assert b" 200 " in connection.recv(1000)
    assert seen.ended.wait(10) and seen.was_stopped and eventually_idle(served)
