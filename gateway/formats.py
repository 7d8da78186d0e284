"""What says which form an answer has, as the Triton model's `guide`: response_format, the format of /v1/responses, and vLLM's
structured_outputs.
"""

from __future__ import annotations

import re
from typing import Any, assert_never

import msgspec

from gateway.errors import GatewayError
from gateway.messages import Completing, JsonObjectFormat, JsonSchema, JsonSchemaFormat, StructuredOutputs, TextFormat
from gateway.origin import OF_SCHEMAS, Form, GuideOrigin
from gateway.response_messages import SchemaFormat

Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | SchemaFormat


def asked_form(message: Completing) -> Form | None:
    """What a request asks for by either name. Raises GatewayError for both."""
    by_format = form_of(message.response_format, "response_format")
    if message.structured_outputs is None:
        return by_format
    if by_format:
        text = "response_format and structured_outputs both say what the answer looks like; leave one out"
        raise GatewayError(400, text, "structured_outputs", "invalid_value")
    return _structured(message.structured_outputs)


def _structured(asked: StructuredOutputs) -> Form:
    given = asked.model_dump(by_alias=True, exclude_none=True)
    if len(given) != 1:
        text = (
            f"structured_outputs has {' and '.join(given) or 'no key'}; give one of json, json_object, regex, choice, "
        )
        raise GatewayError(400, text + "grammar, structural_tag", "structured_outputs", "invalid_value")
    ((key, value),) = given.items()
    origin = GuideOrigin(f"structured_outputs.{key}", OF_SCHEMAS if key == "json" else "invalid_value")
    match key:
        case "json_object":
            return Form({"type": "json"}, origin)
        case "choice":
            return Form({"type": "regex", "text": "|".join(map(re.escape, value))}, origin)
    kind = {"json": "json_schema", "grammar": "ebnf_grammar"}.get(key, key)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Form({"type": kind, "text": text}, origin)


def form_of(format: Format | None, field: str) -> Form | None:
    """What an answer must look like by its format, which the client wrote as `field`; None for plain text."""
    match format:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return Form({"type": "json"}, GuideOrigin(field))
        case JsonSchemaFormat():
            return _of_schema(format.json_schema, f"{field}.json_schema.schema")
        case SchemaFormat():
            return _of_schema(format, f"{field}.schema")
    assert_never(format)


def _of_schema(schema: JsonSchema, field: str) -> Form:
    """Without a schema any JSON object will do."""
    origin = GuideOrigin(field, OF_SCHEMAS)
    if schema.schema_ is None:
        return Form({"type": "json"}, origin)
    return Form({"type": "json_schema", "text": msgspec.json.encode(schema.schema_).decode()}, origin)


def shown_format(format: Format | None) -> dict[str, Any]:
    """The format as an answer repeats it."""
    return {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
