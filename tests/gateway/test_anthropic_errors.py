"""Errors of /v1/messages: their shape, their types and their status, as Anthropic's client reads them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

HELLO: Any = [{"role": "user", "content": "Say hello."}]
ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
pytestmark = pytest.mark.feature("W-11")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    return path


def refusal(claude: anthropic.Anthropic, **values: Any) -> anthropic.APIStatusError:
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(**{"model": "everbatch", "max_tokens": 9, "messages": HELLO, **values})
    return caught.value


def user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


def answer(*blocks: Any) -> Any:
    return [*HELLO, {"role": "assistant", "content": list(blocks)}, *HELLO]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"messages": user(IMAGE)}, "the image at messages[0].content[0].source.data is not served: the model"),
        (
            {"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]})},
            "the image at messages[0].content[0].content[0].source.data is not served: the model",
        ),
        ({"messages": user({"type": "document"})}, "messages[0].content[0].type is 'document', which is not served"),
        ({"messages": user({"type": "txt", "text": "a"})}, "messages[0].content[0].type is 'txt'; it is one of text, "),
        ({"messages": user({"text": "a"})}, "messages[0].content[0].type is missing"),
        (
            {"messages": user({"type": "text", "txt": "a"})},
            "unknown parameter messages[0].content[0].txt; did you mean text?",
        ),
        ({"messages": user({"type": "text", "text": 5})}, "messages[0].content[0].text is 5; it should be a text"),
        ({"messages": user(5)}, "messages[0].content[0].type is missing"),
        ({"messages": []}, "messages is empty; give at least one entry"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role is 'tool'; it should be 'user', 'assistant'",
        ),
        (
            {"messages": user({"type": "tool_use", "id": "a", "name": "b", "input": {}})},
            "messages[0].content[0] is a block of type tool_use in a message of role user; send it in one of role assistant",
        ),
        (
            {"messages": answer({"type": "tool_result", "tool_use_id": "a"})},
            "messages[1].content[0] is a block of type tool_result in a message of role assistant; send it in one of role user",
        ),
        (
            {"messages": answer({"type": "tool_use", "id": "a", "name": "b", "input": {}})[:2]},
            "the last message calls a tool and nothing answers it; send a user message with its tool_result",
        ),
        ({"max_tokens": -1}, "max_tokens is -1; it should be at least 0"),
        ({"max_tokens": 1 << 70}, "max_tokens is 1180591620717411303424; it should be below 2147483648"),
        ({"extra_body": {"temprature": 1}}, "unknown parameter temprature; did you mean temperature?"),
        ({"extra_body": {"temperature": 2.5}}, "temperature is 2.5; it should be at most 2"),
        ({"extra_body": {"stop": ["a"]}}, "unknown parameter stop; did you mean stop_sequences?"),
        ({"extra_body": {"container": {}}}, "container is not served here; leave it out"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers is not served here"),
        ({"extra_body": {"n": 2}}, "unknown parameter n; "),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type is 'bash_20250124'; it should be 'custom'",
        ),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'; "),
        ({"tools": [{"name": "a", "input_schema": {}}] * 2}, "two tools have the same name, a; rename one"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, and there are no tools"),
        (
            {"tool_choice": {"type": "tool"}},
            "tool_choice of type tool has no name; say which tool, or use the type any",
        ),
        (
            {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "b"}},
            "tool_choice names 'b', which is none of the tools; they are a",
        ),
        (
            {"thinking": {"type": "enabled"}},
            "thinking of type enabled has no budget_tokens; give it some, or say adaptive",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0; it should be at least 1"),
        ({"system": [{"type": "text"}]}, "system[0].text is missing"),
        (
            {"extra_body": {"cache_control": {"type": "ephemeral", "ttl": "2h"}}},
            "cache_control.ttl is '2h'; it should be '5m' or '1h'",
        ),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
            "context_management.edits[0].type is 'clear_tool_uses_20250919'; it should be 'clear_thinking_20251015'",
        ),
        ({"messages": [{"role": "user", "content": "error [INVALID_ARGUMENT] no such thing"}]}, "no such thing"),
    ],
)
def test_what_cannot_be_served_is_named_with_the_remedy(values: Any, said: str, claude: anthropic.Anthropic) -> None:
    error = refusal(claude, **values)
    assert isinstance(error, anthropic.BadRequestError)
    body: Any = error.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]
    assert body["request_id"] == error.request_id == error.response.headers["request-id"] != ""


@pytest.mark.parametrize(
    ("prompt", "status", "kind"),
    [
        ("error [RESOURCE_EXHAUSTED] the queue is full", 529, "overloaded_error"),
        ("error [UNAVAILABLE] the model is loading", 503, "api_error"),
        ("error [DEADLINE_EXCEEDED] too late", 504, "timeout_error"),
        ("error [INTERNAL] a secret", 500, "api_error"),
    ],
)
def test_failures_of_the_server_have_the_status_of_the_api(
    prompt: str, status: int, kind: str, claude: anthropic.Anthropic
) -> None:
    error = refusal(claude, messages=[{"role": "user", "content": prompt}])
    body: Any = error.body
    assert (error.status_code, body["error"]["type"]) == (status, kind)
    assert ("retry-after" in error.response.headers) == (status in (503, 529))


def test_an_unknown_model_and_an_unknown_route_are_not_found(served: Served, claude: anthropic.Anthropic) -> None:
    error = refusal(claude, model="claude")
    assert isinstance(error, anthropic.NotFoundError) and "served are: everbatch" in str(error)
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("claude")
    for path, headers in (("/v1/messages/x", {}), ("/v1/files", {"anthropic-version": "2023-06-01"})):
        status, body, _ = served.request("GET", path, headers=headers)
        assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert "param" in served.request("GET", "/v1/files")[1]["error"], "others get OpenAI's shape"


def test_an_error_in_a_stream_is_its_last_event(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        late: Any = [{"role": "user", "content": "late error [RESOURCE_EXHAUSTED] the pool is full"}]
        with claude.messages.stream(model="everbatch", max_tokens=9, messages=late) as events:
            list(events)
    body: Any = caught.value.body
    assert body["error"] == {"type": "overloaded_error", "message": "the pool is full"} and body["request_id"]


def test_a_body_that_is_too_large_is_told_so(serve: Callable[..., AbstractContextManager[Served]]) -> None:
    with serve(max_body_bytes=1000) as served, anthropic.Anthropic(base_url=served.url, api_key="k") as claude:
        error = refusal(claude, messages=[{"role": "user", "content": "a" * 1000}])
    body: Any = error.body
    assert isinstance(error, anthropic.ContentTooLargeError) and body["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_comes_in_either_header_and_has_its_namespace(
    header: str, keys: Path, serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    """Anthropic's client sends one or the other, by its version."""
    body = {"model": "everbatch", "max_tokens": 1, "messages": HELLO}
    with serve(api_keys=keys) as served:
        for key in (ALICE, BOB, ALICE):
            sent = {header: key if header == "x-api-key" else f"Bearer {key}"}
            assert served.request("POST", "/v1/messages", body, sent)[0] == 200
            with anthropic.Anthropic(base_url=served.url, max_retries=0, api_key=key) as claude:
                claude.messages.count_tokens(model="everbatch", messages=HELLO)
        with anthropic.Anthropic(base_url=served.url, api_key="another-0123456789", max_retries=0) as claude:
            error = refusal(claude)
        assert served.request("POST", "/v1/messages", body, {header: "another-0123456789"})[0] == 401
    spaces = [seen.namespace for seen in triton.requests]
    assert spaces[0::2] == spaces[1::2] and spaces[0] == spaces[4] != spaces[2] and "" not in spaces
    told: Any = error.body
    assert isinstance(error, anthropic.AuthenticationError) and told["error"]["type"] == "authentication_error"


def test_a_client_that_holds_its_share_is_limited_and_a_full_server_is_overloaded(
    keys: Path, serve: Callable[..., AbstractContextManager[Served]], triton: FakeTriton
) -> None:
    hold: Any = {"model": "everbatch", "max_tokens": 9, "messages": [{"role": "user", "content": "hold"}]}
    with serve(api_keys=keys, max_choices=4) as served, serve(max_choices=1) as small:
        with anthropic.Anthropic(base_url=served.url, api_key=ALICE, max_retries=0) as claude:
            held = [claude.messages.create(**hold, stream=True) for _ in range(3)]
            error = refusal(claude)
            for stream in held:
                stream.close()
        with anthropic.Anthropic(base_url=small.url, api_key="none", max_retries=0) as claude:
            with claude.messages.create(**hold, stream=True):
                full = refusal(claude)
    body: Any = error.body
    assert isinstance(error, anthropic.RateLimitError) and body["error"]["type"] == "rate_limit_error"
    assert isinstance(full, anthropic.OverloadedError) and full.status_code == 529
