"""What the model refuses of a guide, told by the name of the field that the client wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend.api.guide import InvalidGuide
from backend.guided.protocol import GuideError
from gateway.errors import from_triton
from gateway.invalid import parse
from gateway.messages import ChatRequest
from gateway.origin import GuideOrigin
from gateway.response_messages import ResponseRequest
from gateway.translate import chat, response
from tests.gateway.conftest import Served
from tests.guided.tools import compiled

CHAT: dict[str, Any] = {"model": "everbatch", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA_FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
TWO_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"not": {}}}} for name in ("f", "g")
]
ONE_OF_TWO = {"type": "function", "function": {"name": "g"}}
FIELDS: list[tuple[dict[str, Any], str, str | None, str | None]] = [
    ({"response_format": SCHEMA_FORMAT}, "guide: ", "response_format.json_schema.schema", "invalid_json_schema"),
    ({"structured_outputs": {"json": {}}}, "guide: ", "structured_outputs.json", "invalid_json_schema"),
    ({"structured_outputs": {"regex": "("}}, "guide: ", "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"choice": ["a"]}}, "guide: ", "structured_outputs.choice", "invalid_value"),
    (
        {"structured_outputs": {"structural_tag": {}}},
        "guide.structures[1].schema: ",
        "structured_outputs.structural_tag.structures[1].schema",
        "invalid_value",
    ),
    (
        {"tools": TWO_TOOLS},
        "guide.structures[1].schema: ",
        "tools[1].function.parameters",
        "invalid_function_parameters",
    ),
    (
        {"tools": TWO_TOOLS, "tool_choice": ONE_OF_TWO},  # the guide is of this tool alone, which is the second one
        "guide.structures[0].schema: ",
        "tools[1].function.parameters",
        "invalid_function_parameters",
    ),
    ({"tools": TWO_TOOLS}, "guide: ", "tools", "invalid_function_parameters"),
    ({"tools": TWO_TOOLS, "tool_choice": "none"}, "guide: ", None, None),
    ({"response_format": SCHEMA_FORMAT}, "the guide and what else: ", None, None),
    ({"response_format": SCHEMA_FORMAT}, "seed is 0.5: ", "seed", None),
]


@pytest.mark.parametrize(("added", "opening", "param", "code"), FIELDS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_refuses_of_a_guide_names_the_field_that_the_client_wrote(
    added: dict[str, Any], opening: str, param: str | None, code: str | None, stream: bool, served: Served
) -> None:
    """The model names a place in the guide, of which only the gateway knows what it was made of."""
    text = f"error [INVALID_ARGUMENT] {opening}it is bad"
    body = {"model": "everbatch", "messages": [{"role": "user", "content": text}], "stream": stream, **added}
    status, answer, _ = served.request("POST", "/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)
    is_of_guide = opening.startswith("guide") and param is not None
    assert error["message"] == f"{param}: it is bad" if is_of_guide else f"{opening}it is bad"


def test_the_same_in_responses_where_the_field_is_another() -> None:
    flat = {"type": "json_schema", **SCHEMA_FORMAT["json_schema"]}
    message = parse(
        ResponseRequest, json.dumps({"model": "everbatch", "input": "hi", "text": {"format": flat}}).encode()
    )[0]
    refusal = from_triton("[INVALID_ARGUMENT] guide: it is bad", response(message, [], []).origin)
    assert (refusal.param, refusal.code) == ("text.format.schema", "invalid_json_schema")
    assert refusal.message == "text.format.schema: it is bad"


def test_where_no_guide_is_taken_the_field_is_named_too() -> None:
    origin = GuideOrigin("response_format")
    refusal = from_triton("[INVALID_ARGUMENT] GuidedDecoder is not setup: guided.backend is none", origin)
    assert (refusal.param, refusal.code) == ("response_format", "unsupported_parameter")
    assert refusal.message == "GuidedDecoder is not setup: guided.backend is none"


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_engine_and_the_gateway_agree_on_the_place_of_a_tool(bad: int, choice: str) -> None:
    """What the engine's own compiler says of the gateway's own tag."""
    tools = [tool | {"function": {"name": tool["function"]["name"]}} for tool in TWO_TOOLS]
    tools[bad] = {**TWO_TOOLS[bad], "function": {**TWO_TOOLS[bad]["function"], "strict": True}}
    body = {**CHAT, "tools": tools, "tool_choice": choice}
    asked = chat(parse(ChatRequest, json.dumps(body).encode())[0])
    with pytest.raises(GuideError) as caught:
        compiled(asked.request["guide"]["type"], asked.request["guide"]["text"])
    said = InvalidGuide(str(caught.value), caught.value.place)
    refusal = from_triton(f"[{said.code}] {said.message}", asked.origin)
    assert refusal.param == f"tools[{bad}].function.parameters" and 'Unimplemented keys: ["not"]' in refusal.message
