"""/tokenize and /detokenize, as vLLM's clients and vllm-router use them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import TOKENIZER, FakeTriton
from tests.gateway.test_browsers import routes

MODEL = {"model": "everbatch"}
TURNS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"prompt": "abc"}, {"prompt": "abc"}),
        ({"prompt": "abc", "add_special_tokens": True, "return_token_strs": False}, {"prompt": "abc"}),
        ({"messages": TURNS}, {"messages": TURNS}),
        (
            {"messages": TURNS, "continue_final_message": False, "add_generation_prompt": False},
            {"messages": TURNS, "add_generation_prompt": False},
        ),
        (
            {
                "messages": TURNS,
                "chat_template_kwargs": {"a": 1},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            {
                "messages": TURNS,
                "chat_template_kwargs": {"a": 1},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        ),
    ],
)
def test_a_prompt_becomes_tokens(
    given: dict[str, Any], sent: dict[str, Any], served: Served, triton: FakeTriton
) -> None:
    status, answer, _ = served.request("POST", "/tokenize", MODEL | given)
    assert (status, answer) == (200, {"count": 3, "max_model_len": 2048, "tokens": [7, 8, 9], "token_strs": None})
    body = triton.requests[-1].body
    assert body.pop("timeout_s") > 0 and body == sent | {"tokenize": True}


def test_tokens_become_text(served: Served, triton: FakeTriton) -> None:
    status, answer, _ = served.request("POST", "/detokenize", MODEL | {"tokens": [3, 4]})
    assert (status, answer) == (200, {"prompt": "its text"})
    body = triton.requests[-1].body
    assert body.pop("timeout_s") > 0 and body == {"prompt_token_ids": [3, 4], "echo": True, "tokenize": True}


@pytest.mark.parametrize(
    ("path", "given", "text"),
    [
        ("/tokenize", {}, "one of prompt and messages is expected, none of them is given"),
        (
            "/tokenize",
            {"prompt": "a", "messages": TURNS},
            "one of prompt and messages is expected, both of them is given",
        ),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens is false"),
        ("/tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens is true"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "there is no model 'other'"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1e308]}, "tokens"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(path: str, given: dict[str, Any], text: str, served: Served) -> None:
    status, answer, _ = served.request("POST", path, MODEL | given)
    assert status in (400, 404) and text in answer["error"]["message"]


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-1", b"2147483648", b"true", b"1.5", b"1" + b"0" * 400])
def test_a_token_id_that_is_none_is_one_sentence(number: bytes, served: Served, triton: FakeTriton) -> None:
    status, answer, _ = served.request("POST", "/detokenize", b'{"model": "everbatch", "tokens": [3, ' + number + b"]}")
    assert status == 400 and "\n" not in answer["error"]["message"] and len(answer["error"]["message"]) < 400
    assert triton.requests == []
    assert served.request("POST", "/detokenize", MODEL | {"tokens": [3]})[0] == 200


def test_what_is_known_of_the_tokenizer_is_told_as_vllm_does(served: Served, triton: FakeTriton) -> None:
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **TOKENIZER}
    for path in ("/tokenizer_info", "/tokenizer_info?model=everbatch"):
        assert served.request("GET", path)[:2] == (200, found)
    asked = {"prompt_token_ids": [0], "tokenize": True, "tell_tokenizer": True}
    assert asked.items() <= triton.last().body.items()
    assert served.request("GET", "/tokenizer_info?model=nobody")[0] == 404


def test_head_is_answered_wherever_get_is(served: Served) -> None:
    app: Any = served.server.config.app
    paths = [path for method, path in routes(app) if method == "GET" and "name" not in path and "_id" not in path]
    assert {"/health", "/ping", "/v1/models", "/metrics", "/version", "/everbatch/live"} <= set(paths)
    for path in (*paths, "/", "/page/index.html", "/v1/models/everbatch"):
        (head, text, of_head) = served.request("HEAD", path)
        if path == "/everbatch/live":
            assert (head, text, of_head["content-type"]) == (200, "", "text/event-stream; charset=utf-8")
            continue
        get, _, of_get = served.request("GET", path)
        assert (head, text) == (get, "") and of_head.get("content-type") == of_get.get("content-type"), path
        if path in ("/health", "/v1/models", "/version"):
            assert of_head["content-length"] == of_get["content-length"]
    assert served.request("HEAD", "/v1/chat/completions")[0] == 405
