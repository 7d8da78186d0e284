"""Keys that well-known clients send: those without effect pass and are named, what would change the answer is refused or done."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from gateway.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.errors import GatewayError
from gateway.infill_messages import InfillRequest
from gateway.interactive_messages import InteractiveRequest
from gateway.invalid import parse, refused_of
from gateway.messages import ChatRequest, CompletionRequest, Wire
from gateway.ollama_messages import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate
from gateway.response_messages import ConversationItems, InputTokensRequest, NewConversation, ResponseRequest
from gateway.token_messages import TokenizeRequest
from gateway.vector_messages import EmbeddingRequest, RerankRequest
from gateway.without_effect import IGNORED, TABLE, Key, allows, keys_of, take_out
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton
from tools import write_key_table

HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
ITEM = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:"}}
WITH_IMAGE = [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE_PART]}]
INPUT_IMAGE = {"type": "input_image", "image_url": "data:"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}
BODIES: dict[type[Wire], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": WITH_IMAGE, "tools": [TOOL], "stream": True, "stream_options": {}},
    CompletionRequest: {"model": "m", "prompt": "hi", "stream": True, "stream_options": {}},
    ResponseRequest: {
        "model": "m",
        "input": [ITEM, OUTPUT],
        "tools": [FLAT_TOOL],
        "stream": True,
        "stream_options": {},
    },
    InputTokensRequest: {"model": "m", "input": [ITEM, OUTPUT], "tools": [FLAT_TOOL]},
    MessagesRequest: {"model": "m", "max_tokens": 1, "messages": HI},
    CountTokensRequest: {"model": "m", "messages": HI},
    EmbeddingRequest: {"model": "m", "input": "hi"},
    RerankRequest: {"model": "m", "query": "q", "documents": ["d"]},
    TokenizeRequest: {"model": "m", "messages": WITH_IMAGE, "tools": [TOOL]},
    InteractiveRequest: {"prompt": WITH_IMAGE},
    InfillRequest: {"input_prefix": "hi"},
    OllamaChat: {"model": "m", "messages": [], "options": {}},
    OllamaGenerate: {"model": "m", "options": {}},
    OllamaEmbed: {"model": "m", "input": "hi", "options": {}},
    OllamaEmbeddings: {"model": "m", "prompt": "hi", "options": {}},
    NewConversation: {"items": [{"role": "user", "content": [INPUT_IMAGE]}]},
    ConversationItems: {"items": [{"role": "user", "content": [INPUT_IMAGE]}]},
}
OF_TYPE = {str: ["a", ""], int: [0, -7, 10**30], float: [0, 0.5, -1e308], bool: [True, False], dict: [{}, {"a": 1}]}
OF_TYPE |= {list: [[], ["a"]], object: ["5m", 1, [{}]]}
NEVER = {str: 1, int: True, float: True, bool: 1, dict: [], list: {}, object: None}  # of another type
CASES = [(kind, key) for key in TABLE for kind in key.messages]


def with_key(kind: type[Wire], key: Key, value: Any) -> bytes:
    """A request in which the first object at the key's place has it."""
    body: Any = json.loads(json.dumps(BODIES[kind]))
    place = body
    names = key.place.split(".") if key.place else []
    for name, after in zip(names, [*names[1:], None]):
        place = place[name]
        place = next((one for one in place if after in one), place[0]) if isinstance(place, list) else place
    place[key.name] = value
    return json.dumps(body).encode()


def named(case: Any) -> str:
    return case.path if isinstance(case, Key) else case.__name__


@pytest.mark.parametrize(("kind", "key"), CASES, ids=named)
def test_a_key_of_the_table_passes_with_its_values_and_with_no_other(kind: type[Wire], key: Key) -> None:
    plain, nothing = parse(kind, json.dumps(BODIES[kind]).encode())
    assert nothing == []
    values = key.values if isinstance(key.values, tuple) else OF_TYPE[key.values]
    for value in values:
        message, ignored = parse(kind, with_key(kind, key, value))
        assert message == plain and [one.path for one in ignored] == [key.path]
    assert parse(kind, with_key(kind, key, None)) == (plain, []), "null asks for nothing"
    for bad in ["no such value", 1e300, [None]] if isinstance(key.values, tuple) else [NEVER[key.values]]:
        if bad is not None:
            with pytest.raises(GatewayError) as caught:
                parse(kind, with_key(kind, key, bad))
            assert (caught.value.status, caught.value.param) == (400, key.path)
            assert key.remedy in caught.value.message and len(caught.value.message) < 400


def test_no_key_stands_in_the_table_and_among_the_fields_too() -> None:
    for kind in BODIES:
        own = keys_of(kind).get("", {})
        assert not own.keys() & set(kind.model_fields) and not own.keys() & set(refused_of(kind)), kind
        assert sum(kind in key.messages for key in TABLE) == sum(map(len, keys_of(kind).values())), "one row each"


@pytest.mark.parametrize(
    ("kind", "key", "meant"),
    [
        (ChatRequest, "chat_templte", "chat_template"),
        (CompletionRequest, "prioritty", "priority"),
        (ResponseRequest, "safety_identifer", "safety_identifier"),
        (MessagesRequest, "tread", "thread"),
        (EmbeddingRequest, "usr", "user"),
    ],
)
def test_a_misspelled_key_is_refused_with_the_one_that_was_meant(kind: type[Wire], key: str, meant: str) -> None:
    with pytest.raises(GatewayError, match=f"unknown parameter {key}; did you mean {meant}"):
        parse(kind, json.dumps({**BODIES[kind], key: 1}).encode())


def test_a_misspelled_key_in_a_part_is_refused_likewise() -> None:
    part = {"type": "text", "text": "hi", "cache_contrl": {"type": "ephemeral"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(GatewayError, match="unknown parameter messages.*cache_contrl; did you mean cache_control"):
        parse(ChatRequest, json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [[], 5, None, "x", {"messages": {"content": 5}}, {"messages": [[[{}]]], "tools": [None, 3, {"function": []}]}],
)
def test_what_is_no_message_is_left_to_the_check_that_follows(body: Any) -> None:
    assert take_out(ChatRequest, body) == []


def test_an_object_of_too_many_keys_is_not_looked_at() -> None:
    assert take_out(ChatRequest, {"priority": 1, **{str(i): 1 for i in range(200)}}) == []


@pytest.mark.parametrize(
    ("values", "value", "fits"),
    [((1,), True, False), ((1,), 1.0, True), ((0,), False, False), ((False,), 0, False), ((), 0, False)],
)
def test_true_is_not_one(values: tuple[Any, ...], value: Any, fits: bool) -> None:
    assert allows(values, value) is fits


def test_the_page_tells_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text()
    assert write_key_table.PART.replaced(page, write_key_table.table()) == page, "run python -m tools.write_key_table"


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatRequest, completion_create_params.CompletionCreateParamsBase),
        (ResponseRequest, response_create_params.ResponseCreateParamsBase),
        (MessagesRequest, anthropic.types.beta.message_create_params.MessageCreateParamsBase),
    ],
)
def test_every_key_of_the_clients_own_packages_is_known(kind: type[Wire], params: Any) -> None:
    known = set(kind.model_fields) | set(keys_of(kind)[""]) | set(refused_of(kind))
    assert set(params.__annotations__) - known == set()


def test_an_answer_names_what_had_no_effect_and_the_log_does_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {"model": "everbatch", "messages": [{"role": "user", "content": [part] * 3}], "rid": "r-7", "options": None}
    with caplog.at_level(logging.INFO, "everbatch.gateway"):
        for stream in (False, True):
            status, _, headers = served.request("POST", "/v1/chat/completions", {**body, "stream": stream})
            assert (status, headers[IGNORED]) == (200, "messages.content.cache_control, rid")
    told = [one.getMessage() for one in caplog.records if "has no effect here" in one.getMessage()]
    assert sorted(one.partition(" ")[0] for one in told) == ["messages.content.cache_control", "rid"]
    assert "r-7" not in "".join(told)
    assert IGNORED not in served.request("POST", "/v1/chat/completions", {"model": "everbatch", "messages": HI})[2]


def test_anthropics_client_goes_on_without_a_thread_when_there_is_none(served: Served, triton: FakeTriton) -> None:
    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    triton.script.extend([call, "It is 3."])
    runner = client.beta.messages.tool_runner(
        model="everbatch",
        max_tokens=99,
        tools=[anthropic.beta_tool(add)],
        messages=[{"role": "user", "content": "1+2?"}],
    )
    assert runner.until_done().content[0].text == "It is 3."  # type: ignore[union-attr]
    assert [turn["role"] for turn in triton.last().body["messages"]][-3:] == ["user", "assistant", "tool"]


def test_a_limit_of_minus_one_is_none(served: Served, triton: FakeTriton) -> None:
    for path, own in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "hi"})):
        for name in ("max_tokens", "max_completion_tokens"):
            assert served.request("POST", f"/v1/{path}", {"model": "everbatch", **own, name: -1})[0] == 200
            assert "max_tokens" not in triton.last().body
    assert (
        served.request("POST", "/v1/responses", {"model": "everbatch", "input": "hi", "max_output_tokens": -1})[0]
        == 200
    )
    assert "max_tokens" not in triton.last().body
    for bad in (-2, -1.5, True, "-1"):
        body = {"model": "everbatch", "messages": HI, "max_tokens": bad}
        assert served.request("POST", "/v1/chat/completions", body)[0] == 400


@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"a": {"type": "null"}}}])
def test_json_objects_are_held_to_the_schema_beside_them(schema: Any, served: Served, triton: FakeTriton) -> None:
    asked = {"type": "json_object", **({} if schema is None else {"schema": schema})}
    for path, body in (
        ("chat/completions", {"messages": HI, "response_format": asked}),
        ("responses", {"input": "hi", "text": {"format": asked}}),
    ):
        assert served.request("POST", f"/v1/{path}", {"model": "everbatch", **body})[0] == 200
        guide = triton.last().body["guide"]
        assert (guide["type"], json.loads(guide.get("text", "null"))) == ("json_schema" if schema else "json", schema)


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_the_usage_so_far_stands_in_every_chunk_where_that_is_asked_for(path: str, client: openai.OpenAI) -> None:
    extra: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks: list[Any]
    if path == "chat":
        said: Any = [{"role": "user", "content": "hi"}]
        chunks = list(
            client.chat.completions.create(model="everbatch", messages=said, stream=True, n=2, extra_body=extra)
        )
    else:
        chunks = list(client.completions.create(model="everbatch", prompt="hi", stream=True, n=2, extra_body=extra))
    of_choice = [[one.usage for one in chunks if one.choices and one.choices[0].index == index] for index in (0, 1)]
    for usages in of_choice:
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) > 2
        assert {usage.prompt_tokens for usage in usages} == {chunks[-1].usage.prompt_tokens}
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].choices == []


def test_reasoning_is_switched_as_other_apis_do_it(served: Served, triton: FakeTriton) -> None:
    for kind, is_on in (("disabled", False), ("enabled", True)):
        body = {"model": "everbatch", "messages": HI, "thinking": {"type": kind}}
        assert served.request("POST", "/v1/chat/completions", body)[0] == 200
        assert triton.last().body["chat_template_kwargs"] == {"enable_thinking": is_on}
    status, answer, _ = served.request("POST", "/v1/chat/completions", {**body, "enable_thinking": False})
    assert (status, answer["error"]["param"]) == (400, "thinking")
