"""/v1/chat/interactive and /v1/encode, by LMDeploy's client and by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat.llm import RequestError
from compat.lmdeploy import APIClient, get_model_list
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton

PATH = "/v1/chat/interactive"
TEXT = "".join(WORDS)


@pytest.fixture
def client(served: Served) -> APIClient:
    return APIClient(served.url, timeout_s=60)


def turns(triton: FakeTriton) -> list[tuple[str, str]]:
    """Roles and texts of the last request."""
    return [(turn["role"], turn["content"]) for turn in triton.last().body["messages"]]


def test_a_turn_has_lmdeploys_fields_and_its_defaults_of_sampling(client: APIClient, triton: FakeTriton) -> None:
    (answer,) = client.chat_interactive_v1("hi", request_output_len=9, min_new_tokens=2, stop=["x"], seed=4)
    assert answer["text"] == TEXT and answer["finish_reason"] == "stop"
    assert set(answer) == {"text", "tokens", "input_tokens", "history_tokens", "finish_reason"}
    body = triton.last().body
    assert {
        name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop", "seed")
    } == ({"temperature": 0.8, "top_p": 0.8, "top_k": 40, "max_tokens": 9, "min_tokens": 2, "stop": ["x"], "seed": 4})
    assert body["repetition_penalty"] == 1.0 and "stream" not in body


def test_a_stream_is_lines_of_json_whose_texts_join_to_the_answer(client: APIClient, triton: FakeTriton) -> None:
    chunks = list(client.chat_interactive_v1("hi", stream=True))
    assert len(chunks) > 1 and "".join(chunk["text"] for chunk in chunks) == TEXT
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    counts = [chunk["tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == len(WORDS)


def test_an_interactive_session_has_its_history_until_a_turn_ends_it(client: APIClient, triton: FakeTriton) -> None:
    ask: Callable[..., Any] = lambda prompt, **more: next(client.chat_interactive_v1(prompt, session_id=7, **more))
    first = ask("one", interactive_mode=True)
    second = ask("two", interactive_mode=True)
    assert turns(triton) == [("user", "one"), ("assistant", TEXT), ("user", "two")]
    assert second["history_tokens"] == first["input_tokens"] + first["tokens"] > 0
    assert second["input_tokens"] == 0 < first["input_tokens"]  # the fake's prompt does not grow: it is all history
    third = ask([{"role": "user", "content": "three"}])  # the last turn: interactive_mode is off
    assert third["history_tokens"] == second["history_tokens"] + second["tokens"], "of all turns, not of the last one"
    assert len(turns(triton)) == 5
    ask("again", interactive_mode=True)
    assert turns(triton) == [("user", "again")]
    client.end_session(7)
    ask("new", interactive_mode=True)
    assert turns(triton) == [("user", "new")]
    client.end_session(7)


def test_requests_without_a_session_share_nothing(client: APIClient, triton: FakeTriton) -> None:
    for prompt in ("one", "two"):
        list(client.chat_interactive_v1(prompt, interactive_mode=True))
    assert turns(triton) == [("user", "two")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("command", [{"cancel": True}, {"stop": True}])
def test_a_running_turn_can_be_ended_and_is_alone_in_its_session(
    stream: bool, command: dict[str, bool], client: APIClient, served: Served, triton: FakeTriton
) -> None:
    found: list[dict[str, Any]] = []
    asked = client.chat_interactive_v1("hold", session_id=8, interactive_mode=True, stream=stream)
    thread = threading.Thread(target=lambda: found.extend(asked))
    thread.start()
    seen = triton.wait_for(1)[0]
    status, answer, _ = served.request("POST", PATH, {"prompt": "more", "session_id": 8})
    assert status == 409 and "session 8 has a turn that is running; wait for it, or send cancel: true" in str(answer)
    (nothing,) = client.chat_interactive_v1("", session_id=8, **command)
    assert nothing == {"text": "", "tokens": 0, "input_tokens": 0, "history_tokens": 0, "finish_reason": None}
    thread.join(60)
    assert not thread.is_alive() and seen.ended.wait(60), "the turn goes on"
    assert found[-1]["finish_reason"] == "stop" and "".join(chunk["text"] for chunk in found) in ("", " tick")
    assert next(client.chat_interactive_v1("hi", session_id=8))["text"] == TEXT


def test_a_turn_that_fails_leaves_the_session_as_it_was(client: APIClient, triton: FakeTriton) -> None:
    list(client.chat_interactive_v1("one", session_id=9, interactive_mode=True))
    with pytest.raises(RequestError, match="status 400: no room"):
        list(client.chat_interactive_v1("error [INVALID_ARGUMENT] no room", session_id=9, interactive_mode=True))
    late = "late error [INVALID_ARGUMENT] no more"
    chunks = list(client.chat_interactive_v1(late, session_id=9, interactive_mode=True, stream=True))
    assert chunks[-1] == {
        "text": "no more",
        "tokens": 0,
        "input_tokens": 0,
        "history_tokens": 0,
        "finish_reason": "error",
    }
    list(client.chat_interactive_v1("two", session_id=9))
    assert turns(triton) == [("user", "one"), ("assistant", TEXT), ("user", "two")]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"session_id": -2}, "session_id"),
        ({"session_id": 1 << 63}, "session_id"),
        ({"session_id": 1e308}, "session_id"),
        ({"request_output_len": -1}, "request_output_len"),
        ({"temperature": 1e999}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"image_url": "http://a/b.png"}, "image_url"),
        ({"adapter_name": "nobody"}, "there is no model 'nobody'"),
        ({"sesion_id": 1}, "did you mean 'session_id'|session_id"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, "no tool_call_id"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], text: str, served: Served) -> None:
    status, answer, _ = served.request("POST", PATH, {"prompt": "hi"} | given)
    assert status in (400, 404)
    assert any(part in json.dumps(answer) for part in text.split("|"))


def test_an_adapter_is_named(client: APIClient, serve: Callable[..., Any], triton: FakeTriton) -> None:
    with serve(adapters=("doll",)) as served:
        list(APIClient(served.url, timeout_s=60).chat_interactive_v1("hi", adapter_name="doll"))
    assert triton.last().body["lora_name"] == "doll"


def test_sessions_belong_to_their_key(serve: Callable[..., Any], triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one secret-of-number-1\ntwo secret-of-number-2\n")
    keys.chmod(0o600)
    with serve(api_keys=keys) as served:
        for key in ("secret-of-number-1", "secret-of-number-2"):
            client = APIClient(served.url, key, timeout_s=60)
            list(client.chat_interactive_v1(key, session_id=1, interactive_mode=True))
        assert turns(triton) == [("user", "secret-of-number-2")]
        list(client.chat_interactive_v1("more", session_id=1))
        assert [text for _, text in turns(triton)] == ["secret-of-number-2", TEXT, "more"]
        one, two = (APIClient(served.url, f"secret-of-number-{number}", timeout_s=60) for number in (1, 2))
        num_before = len(triton.requests)
        asked = one.chat_interactive_v1("hold", session_id=8, interactive_mode=True)
        thread = threading.Thread(target=list, args=(asked,))
        thread.start()
        held = triton.wait_for(num_before + 1)[-1]
        list(two.chat_interactive_v1("", session_id=8, cancel=True))
        assert next(two.chat_interactive_v1("hi", session_id=8))["text"] == TEXT, "its own session is free"
        assert not held.ended.is_set(), "another client's turn goes on"
        list(one.chat_interactive_v1("", session_id=8, cancel=True))
        thread.join(60)
        assert not thread.is_alive() and held.ended.wait(60)


def test_calls_and_reasoning_of_earlier_turns_reach_the_model(client: APIClient, triton: FakeTriton) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "content": "three", "tool_call_id": "c"},
    ]
    next(client.chat_interactive_v1(given, session_id=9, interactive_mode=True))
    next(client.chat_interactive_v1("four", session_id=9))
    _, answer, result, own, last = triton.last().body["messages"]
    assert answer["reasoning_content"] == "why" and answer["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result == {"role": "tool", "content": "three", "tool_call_id": "c"}
    assert (own["role"], last["content"]) == ("assistant", "four")


def test_a_session_is_no_conversation(client: APIClient, served: Served) -> None:
    """Whoever guesses its number can neither read nor change it there."""
    next(client.chat_interactive_v1("one", session_id=8, interactive_mode=True))
    path = "/v1/conversations/interactive_8"
    asked = {"model": "everbatch", "input": "x", "conversation": "interactive_8"}
    assert served.request("GET", f"{path}/items")[0] == 404
    assert served.request("POST", path, {"metadata": {"tokens": "many"}})[0] == 404
    assert served.request("POST", "/v1/responses", asked)[0] == 404
    assert served.request("DELETE", path)[0] == 404
    second = next(client.chat_interactive_v1("two", session_id=8))
    assert second["history_tokens"] > 0


def test_texts_are_encoded(client: APIClient, triton: FakeTriton, served: Served) -> None:
    assert client.encode("abc") == ([7, 8, 9], 3)
    assert client.encode(["abc", "d"], do_preprocess=True) == ([[7, 8, 9]] * 2, [3, 3])
    assert turns(triton) == [("user", "d")]
    status, answer, _ = served.request("POST", "/v1/encode", {"input": "x", "add_bos": False})
    assert status == 400 and "add_bos false is not how the model reads a text; leave it out" in str(answer)


def test_the_client_has_the_other_calls_of_lmdeploys(client: APIClient, served: Served) -> None:
    assert client.available_models == get_model_list(f"{served.url}/v1/models") == ["everbatch"]
    (chat,) = client.chat_completions_v1("everbatch", [{"role": "user", "content": "hi"}])
    assert chat["choices"][0]["message"]["content"] == TEXT
    chunks = client.completions_v1("everbatch", "hi", stream=True)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == TEXT
    with pytest.raises(RequestError, match="status 404: there is no model 'other'"):
        list(client.completions_v1("other", "hi"))
    with pytest.raises(RequestError, match=r"does not answer .*start it with ./everbatch serve"):
        APIClient("http://127.0.0.1:9").available_models  # noqa: B018
