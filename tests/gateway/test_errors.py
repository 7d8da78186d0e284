"""Errors in OpenAI's shape: the status, the parameter's name, and a sentence with value, limit and remedy."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

from backend.api.guide import Guide, GuideType, no_token_left
from gateway.errors import from_triton
from gateway.origin import GuideOrigin
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import KEYS, FakeTriton

CHAT: dict[str, Any] = {"model": "everbatch", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "everbatch", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "everbatch", "input": "hi"}
SOUND = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
NO_TEXT = [{"role": "user", "content": [{"type": "text", "text": 5}]}]
CALLED = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]
MISSPELLED = [{"role": "user", "contnt": "hi"}]
RESULT = [{"role": "tool", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
OBJECT = {"type": "json_object"}

# path, what is added to a good request, the parameter that is named, what the sentence says
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"nonsense": 1}, "nonsense", "unknown parameter nonsense; leave it out"),
    ("chat/completions", {"tempersture": 0}, "tempersture", "parameter tempersture; did you mean temperature?"),
    ("chat/completions", {"maxTokens": 5}, "maxTokens", "did you mean max_tokens?"),
    ("chat/completions", {"prompt": "hi"}, "prompt", "did you mean messages?"),
    ("chat/completions", {"lora_name": "doll"}, "lora_name", "unknown parameter lora_name; did you mean model?"),
    ("chat/completions", {"stop_sequences": ["a"]}, "stop_sequences", "did you mean stop?"),
    ("chat/completions", {"Foo": 1}, "Foo", "unknown parameter Foo; leave it out"),
    ("chat/completions", {"int": 1}, "int", "unknown parameter int; "),
    ("chat/completions", {"[key]": 1}, "[key]", "unknown parameter [key]; "),
    ("chat/completions", {"": 1}, "", "unknown parameter ''; leave it out"),
    ("chat/completions", {"messages": MISSPELLED}, "messages[0].contnt", "messages[0].contnt; did you mean content?"),
    (
        "chat/completions",
        {"stream_options": {"include_usge": True}},
        "stream_options.include_usge",
        "did you mean include_usage?",
    ),
    ("chat/completions", {"temperature": True}, "temperature", "temperature is true; it should be a number"),
    ("chat/completions", {"messages": None}, "messages", "messages is null; it should be a list"),
    ("chat/completions", {"temperature": 3}, "temperature", "temperature is 3; it should be at most 2"),
    ("chat/completions", {"temperature": "hot"}, "temperature", "temperature is 'hot'; it should be a number"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it should be a number of at least 1 or -1"),
    ("chat/completions", {"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it should be an integer"),
    ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "send one of them"),
    ("chat/completions", {"n": 0}, "n", "n is 0"),
    ("chat/completions", {"n": 129}, "n", "it should be at most 128"),
    ("chat/completions", {"messages": []}, "messages", "messages is empty; give at least one entry"),
    ("chat/completions", {"messages": "hi"}, "messages", "messages is 'hi'"),
    ("chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "messages[0].role is 'x'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "role user has no content; give"),
    (
        "chat/completions",
        {"messages": SOUND},
        "messages[0].content[0].type",
        "is 'input_audio', which is not served",
    ),
    (
        "chat/completions",
        {"messages": NO_TEXT},
        "messages[0].content[0].text",
        "text is 5; it should be a text",
    ),
    ("chat/completions", {"messages": CALLED}, "messages[0].tool_calls[0]", "is missing"),
    ("chat/completions", {"messages": RESULT}, "messages[0].tool_call_id", "say which call it answers"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ("chat/completions", {"tools": [FUNCTION, FUNCTION]}, "tools", "the same name"),
    ("chat/completions", {"tools": [FUNCTION], "tool_choice": OTHER}, "tool_choice.function.name", "none of the tools"),
    ("chat/completions", {"tools": [FUNCTION], "guided_choice": ["a"]}, "guided_choice", "leave one out"),
    (
        "chat/completions",
        {"tools": [FUNCTION], "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "leave one",
    ),
    (
        "chat/completions",
        {"response_format": OBJECT, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format and structured_outputs both say",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema is missing",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "x"}}},
        "response_format.schema",
        "unknown parameter response_format.schema; leave it out",
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        "text.format.name",
        "text.format.name is missing",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type is 'xml'; it is one of text, json_object, json_schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {}}},  # as the responses endpoint has it
        "response_format.json_schema",
        "unknown parameter response_format.schema; did you mean response_format.json_schema, which is missing?",
    ),
    ("chat/completions", {"response_format": {}}, "response_format.type", "response_format.type is missing"),
    ("responses", {"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is 'xml'; it is one of"),
    ("chat/completions", {"structured_outputs": {}}, "structured_outputs", "has no key; give one of json, json_object"),
    ("chat/completions", {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex;"),
    (
        "chat/completions",
        {"structured_outputs": {"choice": []}},
        "structured_outputs.choice",
        "choice is empty; give at least one entry",
    ),
    (
        "chat/completions",
        {"structured_outputs": {"json_object": False}},
        "structured_outputs.json_object",
        "should be true",
    ),
    ("responses", {"structured_outputs": {"regex": "a"}}, "structured_outputs", "use text.format"),
    ("chat/completions", {"functions": [{"name": "f"}]}, "functions", "use tools and tool_choice"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities", "text only"),
    ("chat/completions", {"audio": {"voice": "v", "format": "wav"}}, "audio", "text only"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    ("chat/completions", {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias.x is 'x'; string should match"),
    ("chat/completions", {"logit_bias": {"1": 101}}, "logit_bias", "101; it should be at most 100"),
    ("chat/completions", {"stop": 5}, "stop", "stop is 5; it should be a text or a list"),
    ("completions", {"suffix": 5}, "suffix", "it should be a text"),
    ("completions", {"best_of": 129}, "best_of", "it should be at most 128"),
    (
        "completions",
        {"early_stopping": "ever"},
        "early_stopping",
        "it should be true or false or 'never'",
    ),
    ("completions", {"prompt": ["a"] * 33, "best_of": 4, "n": 2}, "n", "best_of, is 132, the limit is 128"),
    ("completions", {"prompt": []}, "prompt", "is empty; give at least one entry"),
    ("completions", {"prompt": [[]]}, "prompt[0]", "is empty; give at least one entry"),
    ("completions", {"prompt": [-1]}, "prompt[0]", "it should be a text, a number of at least 0 or a list"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", "it should be a text"),
    ("completions", {"prompt": ["a"] * 65, "n": 2}, "n", "prompts times n, or best_of, is 130, the limit is 128"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it should be a number of at least 1 or -1"),
    ("completions", {"prompt": [1, "a"]}, "prompt[1]", "prompt[1] is 'a'; it should be an integer"),
    ("completions", {"prompt": [[1], []]}, "prompt[1]", "is empty; give at least one entry"),
    ("completions", {"messages": []}, "messages", "unknown parameter messages; did you mean prompt?"),
    ("responses", {"messages": []}, "messages", "did you mean input?"),
    ("responses", {"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
    ("responses", {"text": {"fromat": {}}}, "text.fromat", "did you mean format?"),
    ("responses", {"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream: true"),
    ("responses", {"tools": [FUNCTION]}, "tools[0].name", "did you mean tools[0].name, which is missing?"),
    ("responses", {"response_format": {"type": "text"}}, "response_format", "use text.format"),
    ("completions", {"tools": [FUNCTION]}, "tools", "use chat completions"),
    ("completions", {"text": {}}, "text", "use response_format"),
    ("responses", {"background": True}, "background", "is not served here"),
    ("responses", {"truncation": "auto"}, "truncation", "send less input"),
    ("responses", {"previous_response_id": "resp_0"}, "previous_response_id", "send the earlier turns as input"),
    ("responses", {"stream_options": {"include_usage": True}}, "stream_options.include_usage", "last event"),
]


@pytest.mark.parametrize(("path", "added", "param", "sentence"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    path: str, added: dict[str, Any], param: str, sentence: str, served: Served, triton: FakeTriton
) -> None:
    good = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}[path]
    status, body, _ = served.request("POST", f"/v1/{path}", {**good, **added})
    assert status == 400 and set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"].startswith(param) and sentence in error["message"], error
    assert len(error["message"]) < 500 and not triton.requests


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_parameter_is_named(path: str, missing: int, served: Served) -> None:
    good = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}[path]
    name = list(good)[missing]
    status, body, _ = served.request("POST", f"/v1/{path}", {key: good[key] for key in good if key != name})
    assert (status, body["error"]["param"], body["error"]["message"]) == (400, name, f"{name} is missing")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"{", "the body is not valid JSON: EOF while"),
        (b"[1]", "the body is a list; it should be an object"),
        (b"5", "the body is 5; it should be an object"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model": "everbatch", "prompt": "a", "temperature": NaN}', "finite number"),
        (b'{"model": "everbatch", "prompt": "a", "temperature": 1e999}', "finite number"),
        (b'{"model": "everbatch", "prompt": "a", "seed": 1' + b"0" * 100 + b"}", "seed is"),
    ],
)
def test_a_body_that_is_no_proper_json_is_refused(data: bytes, sentence: str, served: Served) -> None:
    status, body, _ = served.request("POST", "/v1/completions", data)
    assert status == 400 and sentence in body["error"]["message"]


def test_of_a_key_that_comes_twice_the_last_one_counts(served: Served, triton: FakeTriton) -> None:
    data = b'{"model": "everbatch", "prompt": "a", "max_tokens": 1, "max_tokens": 2}'
    assert served.request("POST", "/v1/completions", data)[0] == 200 and triton.last().body["max_tokens"] == 2


# what Triton says, the status of the answer, its code, whether it says when to try again
TRITONS: list[tuple[str, int, str | None, bool]] = [
    ("[INVALID_ARGUMENT] temperature is 0.1, odd", 400, None, False),
    ("[INVALID_ARGUMENT] 9,000 tokens are more than model.max_seq_len", 400, "context_length_exceeded", False),
    ("[UNSUPPORTED] min_p is not supported", 400, None, False),
    ("[UNAVAILABLE] the queue is full, limits.max_queue_size is 5", 429, "rate_limit_exceeded", True),
    ("[UNAVAILABLE] the engine is starting", 503, "service_unavailable", True),
    ("[DEADLINE_EXCEEDED] too late", 408, None, False),
    ("[CANCELLED] cancelled", 503, "service_unavailable", True),
    ("[INTERNAL] broken", 500, "internal_error", False),
    ("Request for unknown model: 'everbatch' is not found", 503, "service_unavailable", True),
    ("Traceback: secret path", 500, "internal_error", False),
]


@pytest.mark.parametrize(("text", "status", "code", "again"), TRITONS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_model_becomes_a_status(
    text: str, status: int, code: str | None, again: bool, stream: bool, served: Served
) -> None:
    body = {"model": "everbatch", "prompt": f"error {text}", "stream": stream}
    found, answer, headers = served.request("POST", "/v1/completions", body)
    assert (found, answer["error"]["code"], "retry-after" in headers) == (status, code, again)
    assert "secret" not in answer["error"]["message"] and "[" not in answer["error"]["message"]


def test_the_parameter_that_the_model_names_is_called_as_openai_does() -> None:
    assert from_triton("[INVALID_ARGUMENT] prompt_token_ids holds 99").param == "prompt"
    assert from_triton("[INVALID_ARGUMENT] timeout_s is 0").param is None
    guide, origin = Guide(GuideType.REGEX, "a"), GuideOrigin("structured_outputs.regex")
    for bans, field in ((["bad_words"], "bad_words"), (["min_tokens"], "min_tokens"), ([], origin.field)):
        assert from_triton(f"[INVALID_ARGUMENT] {no_token_left(bans, guide).message}", origin).param == field
    assert from_triton("[INVALID_ARGUMENT] LoRA adapter 'doll': doll: adapter_config.json: ...").param == "model"


def test_each_code_of_the_model_has_its_own_status() -> None:
    statuses = {
        **dict.fromkeys(
            ("INVALID_ARGUMENT", "UNSUPPORTED", "OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"), 400
        ),
        **{"NOT_FOUND": 404, "DEADLINE_EXCEEDED": 408, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503, "CANCELLED": 503},
        **{"INTERNAL": 500, "UNKNOWN": 500, "DATA_LOSS": 500},
    }
    assert {code: from_triton(f"[{code}] text").status for code in statuses} == statuses


def test_each_parameter_that_the_model_names_is_called_as_openai_does() -> None:
    others = {
        **{"prompt_token_ids": "prompt", "lora_name": "model", "LoRA": "model", "num_return_sequences": "n"},
        **{
            "prompt_logprobs": "logprobs",
            "prompt_log_probs": "logprobs",
            "tokenize": None,
            "tell_prompt": None,
            "tell_tokenizer": None,
        },
        **{"beam_width": "n", "include_stop_in_output": "include_stop_str_in_output", "timeout_s": None, "tools": None},
        **{"images": "messages", "visible_tokens": None, "reasoning": None, "prompt_adapter_name": "model"},
        **{"fill": "suffix", "priority": None},
    }
    # Of gateway/adapters.py and gateway/vectors.py, which calls texts as its clients do: no client sends them.
    # Nor are `resume` and `look` theirs: gateway/resuming.py and gateway/live.py send them.
    commands = {"load_adapter", "unload_adapter", "list_adapters", "embed", "rank", "resume", "look"}
    same = {name: name for name in KEYS - set(others) - {"guide"} - commands}
    expected = {**same, **others}
    assert {name: from_triton(f"[INVALID_ARGUMENT] {name} is odd").param for name in expected} == expected


def test_a_stream_that_fails_later_ends_with_an_error_event(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="everbatch", prompt="late error [UNAVAILABLE] engine died", stream=True)
    assert next(stream).choices[0].text == " tick"
    with pytest.raises(openai.APIError, match="engine died"):
        list(stream)


@pytest.mark.parametrize("prompt", ["junk", ["junk"] * 3])
@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_stream_that_the_gateway_fails_at_ends_with_an_error_event(path: str, prompt: Any, served: Served) -> None:
    body = {"model": "everbatch", "prompt": prompt, "stream": True}
    if path == "responses":
        body = {"model": "everbatch", "input": "junk", "stream": True}
    status, text, headers = served.request("POST", f"/v1/{path}", body)
    last = json.loads(text.strip().rpartition("data: ")[2])
    error = last["response"]["error"] if path == "responses" else last["error"]
    assert (status, error["code"]) == (200, "server_error" if path == "responses" else "internal_error")
    assert headers["x-request-id"] in error["message"] and "MAR" not in text


@pytest.mark.parametrize("prompt", ["cut", "late error [INTERNAL] x"])
def test_a_reply_that_ends_early_is_no_reply(prompt: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="everbatch", prompt=prompt)


@pytest.mark.parametrize("prompt", ["timeout", ["timeout"] * 3])
def test_a_reply_that_was_not_ready_in_time_is_408(prompt: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="everbatch", prompt=prompt, n=2)
    assert caught.value.status_code == 408


def test_an_unknown_model_is_404_and_the_known_ones_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["everbatch"]
    assert client.models.retrieve("everbatch").owned_by == "everbatch"
    for call in (
        lambda: client.models.retrieve("gpt"),
        lambda: client.completions.create(model="gpt", prompt="a"),
        lambda: client.responses.create(model="gpt", input="a"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/docs", 404), ("GET", "/v1/completions", 405)]
    + [("PUT", "/v1/models", 405), ("GET", "/v1/responses/resp_0", 404), ("DELETE", "/v1/responses/resp_0", 404)],
)
def test_unknown_routes_and_methods(method: str, path: str, status: int, served: Served) -> None:
    found, body, headers = served.request(method, path)
    assert found == status and body["error"]["message"]
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/nope", "/openapi.json lists them"),
    ],
)
def test_a_route_that_is_spelled_wrong_is_answered_with_the_right_one(path: str, sentence: str, served: Served) -> None:
    status, body, _ = served.request("POST", path, COMPLETION)
    assert (status, body["error"]["message"]) == (404, f"there is no such route; {sentence}")


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}])
def test_another_kind_of_body_is_415(headers: dict[str, str], served: Served) -> None:
    status, body, _ = served.request("POST", "/v1/completions", COMPLETION, headers)
    assert status == 415 and "send" in body["error"]["message"]


def test_without_triton_everything_is_503_until_it_is_back() -> None:
    with FakeTriton() as triton, serving(triton.url) as served:
        served.wait_healthy()
        triton.stop()
        assert served.request("GET", "/health")[0] == 503
        status, body, headers = served.request("POST", "/v1/completions", COMPLETION)
        assert (status, body["error"]["code"]) == (503, "service_unavailable") and "retry-after" in headers
        triton.start()
        served.wait_healthy()
        assert served.request("POST", "/v1/completions", COMPLETION)[0] == 200


@pytest.mark.parametrize("part", ["ready", "model_ready"])
def test_health_follows_the_readiness_of_triton_and_of_the_model(part: str, served: Served, triton: FakeTriton) -> None:
    setattr(triton, part, False)
    try:
        status, body, _ = served.request("GET", "/health")
        assert status == 503 and body["error"]["code"] == "service_unavailable"
    finally:
        setattr(triton, part, True)
    assert served.request("GET", "/health")[:2] == (200, {"status": "ready"})


def test_a_line_that_is_no_http_does_not_end_the_server(served: Served) -> None:
    host, _, port = served.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert served.request("GET", "/health")[0] == 200
