"""What a body may cost: hostile ones are refused after little work, and large ones are read beside the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import core, invalid
from gateway.bodies import LARGE_BODY, MOST_PARTS, decoded, num_parts
from gateway.errors import GatewayError
from gateway.messages import MOST_KEYS, ChatRequest, CompletionRequest, Sampling
from gateway.response_messages import ResponseRequest
from tests.gateway.conftest import Served

CHAT: dict[str, Any] = {"model": "everbatch", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "everbatch", "prompt": "hi"}
RESPONSE: dict[str, Any] = {"model": "everbatch", "input": "hi"}
MANY = 3000
KEYS = {f"k{i}": 1 for i in range(MANY)}
# The message, what is in it, the beginning of the sentence.
HOSTILE: list[tuple[type[Sampling], dict[str, Any], str]] = [
    (ResponseRequest, {**RESPONSE, "include": [0] * MANY}, "include[0] is 0; it should be 'message.output_text"),
    (ResponseRequest, {**RESPONSE, "input": [KEYS]}, "input[0] is an object; it should have at most 100 keys"),
    (
        ResponseRequest,
        {**RESPONSE, "text": {"format": {"type": "text", **KEYS}}},
        "text.format is an object; it should",
    ),
    (CompletionRequest, {**COMPLETION, **KEYS}, "the body is an object; it should have at most 100 keys"),
    (CompletionRequest, {**COMPLETION, "logit_bias": KEYS}, "logit_bias.k0 is 'k0'; string should match"),
    (
        CompletionRequest,
        {**COMPLETION, "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        "logit_bias.0 is 'x';",
    ),
    (ResponseRequest, {**RESPONSE, "metadata": KEYS}, "metadata.k0 is 1; it should be a text"),
    (CompletionRequest, {**COMPLETION, "prompt": [None] * MANY}, "prompt[0] is null; it should be a text"),
    (CompletionRequest, {**COMPLETION, "structured_outputs": KEYS}, "structured_outputs is an object; it should have"),
    (ChatRequest, {**CHAT, "messages": [KEYS] * 20}, "messages[0] is an object; it should have at most 100 keys"),
    (ChatRequest, {**CHAT, "tools": [{"type": "function", "function": KEYS}]}, "tools[0].function is an object; it"),
    (ChatRequest, {**CHAT, "tools": [0] * MANY}, "tools[0] is 0; it should be an object"),
    (ChatRequest, {**CHAT, "modalities": [0] * MANY}, "modalities other than"),
    (ChatRequest, {**CHAT, "stop": [0] * MANY}, "stop[0] is 0; it should be a text"),
]


@pytest.mark.parametrize(("kind", "message", "sentence"), HOSTILE)
def test_of_many_wrong_entries_only_the_first_few_become_errors(
    kind: type[Sampling], message: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    refusal = invalid._refusal

    def counted(errors: list[Any], fields: invalid.Fields) -> GatewayError:
        found.append(len(errors))
        return refusal(errors, fields)

    monkeypatch.setattr(invalid, "_refusal", counted)
    with pytest.raises(GatewayError) as caught:
        invalid.parse(kind, json.dumps(message).encode())
    assert caught.value.message.startswith(sentence), caught.value.message
    assert len(caught.value.message) < 500 and found[0] <= 2 * MOST_KEYS


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponseRequest])
def test_every_list_and_map_of_a_message_ends_its_check_at_the_first_wrong_entry(kind: type[Sampling]) -> None:
    """Those of any JSON cannot be wrong."""
    schemas = [
        schema
        for schema in _schemas(kind.__pydantic_core_schema__)
        for entries in ("items_schema", "values_schema")
        if schema["type"] in ("list", "dict") and schema.get(entries, {"type": "any"})["type"] != "any"
    ]
    assert len(schemas) > 5 and all(schema.get("fail_fast") for schema in schemas), schemas


def _schemas(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        for part in value.values():
            yield from _schemas(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _schemas(part)


def test_a_message_has_fewer_keys_than_an_object_may_have() -> None:
    for kind in (ChatRequest, CompletionRequest, ResponseRequest):
        assert len(kind.model_fields) < MOST_KEYS


TEXTS = st.text(st.sampled_from('"\\[{:,a ü'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> int:
    """Lists, objects and entries of objects, by walking through the value."""
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    return 0


@given(VALUES, st.booleans())
def test_the_parts_of_a_json_text_are_counted_outside_its_strings(value: Any, ascii_only: bool) -> None:
    assert num_parts(json.dumps(value, ensure_ascii=ascii_only).encode()) == counted(value)


@pytest.mark.parametrize("entry", [b"[]", b"{}", b'{"a":1}'])
def test_a_large_body_of_too_many_parts_is_refused_before_it_is_decoded(entry: bytes) -> None:
    with pytest.raises(GatewayError, match=f"the limit is {MOST_PARTS}; send fewer") as caught:
        decoded(b"[" + (entry + b",") * MOST_PARTS + b"no JSON]")
    assert caught.value.status == 400


@pytest.mark.parametrize("entry", [b"0", b'"[{:"'])
def test_a_large_body_may_have_many_numbers_and_texts(entry: bytes) -> None:
    assert len(decoded(b"[" + (entry + b",") * 2 * MOST_PARTS + b"0]")) == 2 * MOST_PARTS + 1


def test_others_are_served_while_a_large_body_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it takes until the others have their answers."""
    reading, others_served = threading.Event(), threading.Event()
    parse = core.parse

    def slow_if_large(kind: Any, body: bytes) -> Any:
        if len(body) > LARGE_BODY:
            reading.set()
            assert others_served.wait(20), "the others wait for the large body"
        return parse(kind, body)

    monkeypatch.setattr(core, "parse", slow_if_large)
    statuses: list[int] = []
    large = {**COMPLETION, "prompt": "x" * LARGE_BODY}
    thread = threading.Thread(target=lambda: statuses.append(served.request("POST", "/v1/completions", large)[0]))
    thread.start()
    assert reading.wait(20)
    assert [served.request("POST", "/v1/completions", COMPLETION)[0] for _ in range(3)] == [200] * 3
    others_served.set()
    thread.join(20)
    assert statuses == [200]


def test_too_many_prompts_are_refused_before_each_becomes_a_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("gateway.translate.completions", asked.append)
    status, body, _ = served.request("POST", "/v1/completions", {**COMPLETION, "prompt": ["a"] * 5000})
    assert status == 400 and "is 5000, the limit is 128" in body["error"]["message"] and not asked
