"""What a client may ask of tools besides the plain choices: some of them only, or text of a form; and calls without marks, on
every wire.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend.api.guide import Guide, GuideType
from gateway.dialect import Dialect
from gateway.errors import GatewayError
from gateway.invalid import parse
from gateway.messages import ChatRequest
from gateway.response_messages import ResponseRequest
from gateway.tool_formats.table import TOOL_FORMATS
from gateway.tools import called_function, form_of_answer, toolset
from gateway.translate import chat, response
from tests.gateway.conftest import Served
from tests.guided.tools import accepts, backend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMES = ["add", "now", "ask"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
FORM = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
CHAT = {"model": "everbatch", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
RESPONSE = {"model": "everbatch", "input": "hi", "tools": FLAT}
HERMES = TOOL_FORMATS["hermes"].format


def chat_of(**added: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **added}).encode())[0]


def response_of(**added: Any) -> ResponseRequest:
    return parse(ResponseRequest, json.dumps({**RESPONSE, **added}).encode())[0]


def allowed(wire: str, mode: str, *names: str) -> dict[str, Any]:
    """`tool_choice` of this type, as each API writes it."""
    if wire == "chat":
        tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def message_of(wire: str, **added: Any) -> ChatRequest | ResponseRequest:
    return chat_of(**added) if wire == "chat" else response_of(**added)


def request_of(message: ChatRequest | ResponseRequest) -> dict[str, Any]:
    return (chat(message) if isinstance(message, ChatRequest) else response(message, [], [])).request


@pytest.mark.parametrize("wire", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_only_these_are_called_and_all_are_shown(wire: str, mode: str) -> None:
    request = request_of(message_of(wire, tool_choice=allowed(wire, mode, "ask", "add")))
    tag = json.loads(request["guide"]["text"])
    assert [json.loads(each["begin"].removeprefix("<tool_call>") + "0}")["name"] for each in tag["structures"]] == [
        "add",
        "ask",
    ]
    assert (tag.get("triggers"), tag.get("free_text")) == ((["<tool_call>"], None) if mode == "auto" else (None, False))
    assert [tool["function"]["name"] for tool in request["tools"]] == NAMES


@pytest.mark.parametrize(
    ("wire", "choice", "param", "words"),
    [
        ("chat", allowed("chat", "auto", "add", "sub"), "tool_choice.allowed_tools.tools[1].function.name", "none of the tools"),
        ("responses", allowed("responses", "auto", "add", "sub"), "tool_choice.tools[1].name", "'sub', which is none of"),
        ("chat", allowed("chat", "auto"), "tool_choice.allowed_tools.tools", "is empty; give at least one"),
        ("responses", allowed("responses", "none", "add"), "tool_choice.mode", "it should be 'auto' or 'required'"),
        ("chat", {"type": "allowed_tools"}, "tool_choice.allowed_tools", "is missing"),
        ("chat", {"type": "tools"}, "tool_choice.type", "it is one of function, allowed_tools"),
        ("chat", {"type": ["x"]}, "tool_choice.type", "it should be 'function'"),
        ("chat", {"type": "function"}, "tool_choice.function", "is missing"),
        ("chat", {"type": "function", "function": {"name": 5}}, "tool_choice.function.name", "it should be a text"),
        ("chat", {"function": {"name": "add"}}, "tool_choice.type", "is missing"),
        ("chat", "sometimes", "tool_choice", "it should be 'none', 'auto' or 'required'"),
        ("responses", "sometimes", "tool_choice", "it should be 'none', 'auto' or 'required'"),
        ("chat", 5, "tool_choice", "it should be 'none', 'auto' or 'required'"),
    ],
)  # fmt: skip
def test_a_choice_that_fits_nothing_is_named(wire: str, choice: Any, param: str, words: str) -> None:
    with pytest.raises(GatewayError) as caught:
        request_of(message_of(wire, tool_choice=choice))
    assert (caught.value.status, caught.value.param) == (400, param) and words in caught.value.message


def test_allowed_tools_without_tools_are_refused() -> None:
    with pytest.raises(GatewayError, match="there are no tools"):
        form_of_answer(chat_of(tools=[], tool_choice=allowed("chat", "auto", "add")), HERMES)


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}}),
    ("chat", {"guided_json": json.dumps(FORM)}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}}}),
    ("responses", {"text": {"format": {"type": "json_object"}}}),
]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "llama"])
@pytest.mark.parametrize(("wire", "added"), FORMS)
def test_with_a_form_and_tools_the_answer_is_a_call_or_text_of_the_form(
    wire: str, added: dict[str, Any], name: str
) -> None:
    format = TOOL_FORMATS[name].format
    form = form_of_answer(message_of(wire, **added), format)
    assert form is not None
    guide = backend().compile(Guide(GuideType(form.guide["type"]), form.guide["text"]))
    add = format.structure(toolset(chat_of()).functions[0])
    values = [part if isinstance(part, str) else "1" for part in add["parts"]] if "parts" in add else ['{"a": 1}']
    call = format.group.begin + "".join([add["begin"], *values, add["end"]]) + format.group.end
    assert accepts(guide, call)
    assert accepts(guide, format.answer + '{"text": "hi"}')
    assert not accepts(guide, format.answer + "hi") and not accepts(guide, call.replace("add", "sub"))
    assert accepts(guide, format.answer + '{"other": 1}') == ("json_object" in json.dumps(added))


@pytest.mark.parametrize(("name", "schema"), [("llama", FORM), ("pythonic", {"type": "array"}), ("pythonic", {})])
def test_a_form_that_begins_like_the_calls_of_the_model_goes_without_tools(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match="this model writes its calls as JSON too"):
        form_of_answer(chat_of(guided_json=schema), TOOL_FORMATS[name].format)


def test_where_a_call_is_asked_for_the_form_of_text_changes_nothing() -> None:
    form, plain = (form_of_answer(chat_of(tool_choice="required", **added), HERMES) for added in (FORMS[0][1], {}))
    assert form is not None and plain is not None and form.guide == plain.guide


def test_where_none_may_be_called_the_form_is_that_of_the_text() -> None:
    form = form_of_answer(chat_of(tool_choice="none", **FORMS[0][1]), HERMES)
    assert form is not None and form.guide["type"] == "json_schema"


@pytest.mark.parametrize(
    ("added", "field"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
    ],
)
def test_a_form_that_is_no_json_goes_without_tools(added: dict[str, Any], field: str) -> None:
    with pytest.raises(GatewayError) as caught:
        form_of_answer(chat_of(**added), HERMES)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_an_answer_of_a_given_form_is_no_call_without_marks() -> None:
    said = '{"name": "add", "arguments": {"a": 1}}'
    for message, is_call in ((chat_of(), True), (chat_of(**FORMS[0][1]), False), (chat_of(tool_choice="none"), False)):
        reader = Dialect(HERMES, None).reader(message)
        assert (reader is not None and bool([*reader.push(said), *reader.flush()]) and reader.num_calls == 1) == is_call


@pytest.mark.parametrize(("said", "num_calls"), [("[{0}, {0}]", 2), ("[{0}]", 1), ("{0}", 1)])
def test_without_parallel_calls_a_list_of_several_is_text(said: str, num_calls: int) -> None:
    text = said.replace("{0}", '{"name": "add", "arguments": {"a": 1}}')
    for parallel, expected in ((True, num_calls), (False, 1 if num_calls == 1 else 0)):
        reader = Dialect(HERMES, None).reader(chat_of(parallel_tool_calls=parallel))
        assert reader is not None
        assert len([*reader.push(text), *reader.flush()]) >= 1 and reader.num_calls == expected


def test_only_allowed_tools_are_calls_without_marks() -> None:
    for name, num_calls in (("add", 1), ("now", 0)):
        reader = Dialect(HERMES, None).reader(chat_of(tool_choice=allowed("chat", "auto", "add")))
        assert reader is not None
        parts = [*reader.push(json.dumps({"name": name, "arguments": {}})), *reader.flush()]
        assert parts and reader.num_calls == num_calls


@pytest.mark.parametrize("text", ["", " \n"])
def test_no_arguments_are_an_empty_object_for_a_template(text: str) -> None:
    assert called_function("c", "add", text)["function"]["arguments"] == {}
    assert called_function("c", "add", "no json")["function"]["arguments"] == "no json"


WIRES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "{}"}], "tools": TOOLS},
    "responses": {"input": "{}", "tools": FLAT},
    "messages": {
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "{}"}],
        "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_a_fenced_call_is_a_call_on_every_wire(wire: str, stream: bool, served: Served) -> None:
    said = '```json\n{"name": "add", "arguments": {"a": 71}}\n```'
    body = json.dumps({"model": "everbatch", "stream": stream, **WIRES[wire]})
    for text, is_call in ((said, True), (said + " is it", False)):
        asked = json.loads(body.replace('"{}"', json.dumps(f"say {text}"), 1))
        status, reply, _ = served.request("POST", f"/v1/{wire}", asked)
        told = reply if isinstance(reply, str) else json.dumps(reply)
        assert status == 200, told
        kinds = [
            kind for kind in ('"tool_calls":', '"function_call"', '"tool_use"') if kind in told.replace('": ', '":')
        ]
        assert bool(kinds) == is_call and ("```" not in told) == is_call, told
