"""Functions in /v1/responses before a real server: the answer is held to the tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.feature("W-11")
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED: Any = {"model": "everbatch", "tools": [TOOL]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_read(stream: bool, client: openai.OpenAI) -> None:
    values: Any = {**ASKED, "temperature": 0, "input": "How warm is it?", "tool_choice": "required"}
    if stream:
        with client.responses.stream(**values) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**values)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "weather") and json.loads(call.arguments)["unit"] in ("C", "F")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "20"}]
    counted = client.responses.input_tokens.count(**ASKED, input=result, tool_choice="none")
    again = client.responses.create(
        **ASKED, input=result, previous_response_id=response.id, tool_choice="none", max_output_tokens=4
    )
    assert again.usage is not None and again.usage.input_tokens > counted.input_tokens > 0
