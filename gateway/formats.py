"""What says which form an answer has, as the Triton model's `guide`: response_format, the format of /v1/responses, and vLLM's
structured_outputs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.messages import Completing, JsonObjectFormat, JsonSchema, JsonSchemaFormat, StructuredOutputs, TextFormat
from gateway.response_messages import SchemaFormat

Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | SchemaFormat


def asked_guide(message: Completing) -> dict[str, Any]:
    """What a request asks for by either name. Raises GatewayError for both."""
    by_format = guide(message.response_format)
    if message.structured_outputs is None:
        return by_format
    if by_format:
        text = "response_format and structured_outputs both say what the answer looks like; leave one out"
        raise GatewayError(400, text, "structured_outputs", "invalid_value")
    return {"guide": _structured(message.structured_outputs)}


def _structured(asked: StructuredOutputs) -> dict[str, str]:
    given = asked.model_dump(by_alias=True, exclude_none=True)
    if len(given) != 1:
        text = (
            f"structured_outputs has {' and '.join(given) or 'no key'}; give one of json, json_object, regex, choice, "
        )
        raise GatewayError(400, text + "grammar, structural_tag", "structured_outputs", "invalid_value")
    ((key, value),) = given.items()
    match key:
        case "json_object":
            return {"type": "json"}
        case "choice":
            return {"type": "regex", "text": "|".join(map(re.escape, value))}
    kind = {"json": "json_schema", "grammar": "ebnf_grammar"}.get(key, key)
    return {"type": kind, "text": value if isinstance(value, str) else msgspec.json.encode(value).decode()}


def guide(format: Format | None) -> dict[str, Any]:
    """The field of the request; empty for plain text."""
    if format is None or isinstance(format, TextFormat):
        return {}
    if isinstance(format, JsonObjectFormat):
        return {"guide": {"type": "json"}}
    return schema_guide(format.json_schema if isinstance(format, JsonSchemaFormat) else format)


def schema_guide(schema: JsonSchema) -> dict[str, Any]:
    """Without a schema any JSON object will do."""
    if schema.schema_ is None:
        return {"guide": {"type": "json"}}
    return {"guide": {"type": "json_schema", "text": msgspec.json.encode(schema.schema_).decode()}}


def shown_format(format: Format | None) -> dict[str, Any]:
    """The format as an answer repeats it."""
    return {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
