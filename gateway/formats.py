"""What says which form an answer has, as the Triton model's `guide`: response_format, and the format of /v1/responses."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.messages import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from gateway.response_messages import SchemaFormat

Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | SchemaFormat


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
