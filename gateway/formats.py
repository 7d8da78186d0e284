"""From the form that a client asks for (response_format, the format of /v1/responses, vLLM's structured_outputs) to the Triton
model's `guide`.
"""

from __future__ import annotations

import re
from typing import Any, assert_never

import msgspec

from gateway.errors import GatewayError
from gateway.messages import Completing, JsonObjectFormat, JsonSchema, JsonSchemaFormat, StructuredOutputs, TextFormat
from gateway.origin import OF_SCHEMAS, Form, GuideOrigin
from gateway.response_messages import Asking, SchemaFormat

Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | SchemaFormat


OLDER_FORMS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)  # vLLM's older names, which LMDeploy has too


def asked_form(message: Completing) -> Form | None:
    """The form that a request asks for, under any of these names. Raises GatewayError if there are two."""
    named = forms_asked(message)
    if len(named) > 1:
        text = f"{' and '.join(named[:2])} both say what the answer looks like; leave one out"
        raise GatewayError(400, text, named[1], "invalid_value")
    if not named:
        return None
    (name,) = named
    if name == "response_format":
        return form_of(message.response_format, name)
    if message.structured_outputs is not None:
        return _structured(message.structured_outputs)
    return _of_kind(name.removeprefix("guided_"), getattr(message, name), name)


def form_of_text(message: Completing | Asking) -> Form | None:
    """The form of an answer that is text. Raises GatewayError."""
    if isinstance(message, Asking):
        return form_of(None if message.text is None else message.text.format, "text.format")
    return asked_form(message)


def forms_asked(message: Completing | Asking) -> list[str]:
    """The fields that say what the answer looks like."""
    if isinstance(message, Asking):
        format = None if message.text is None else message.text.format
        return [] if format is None or isinstance(format, TextFormat) else ["text.format"]
    given = [
        name for name in ("response_format", "structured_outputs", *OLDER_FORMS) if getattr(message, name) is not None
    ]
    return [name for name in given if not isinstance(getattr(message, name), TextFormat)]


def _structured(asked: StructuredOutputs) -> Form:
    given = asked.model_dump(by_alias=True, exclude_none=True)
    if len(given) != 1:
        text = (
            f"structured_outputs has {' and '.join(given) or 'no key'}; give one of json, json_object, regex, choice, "
        )
        raise GatewayError(400, text + "grammar, structural_tag", "structured_outputs", "invalid_value")
    ((key, value),) = given.items()
    return _of_kind(key, value, f"structured_outputs.{key}")


def _of_kind(kind: str, value: Any, field: str) -> Form:
    origin = GuideOrigin(field, OF_SCHEMAS if kind == "json" else "invalid_value")
    match kind:
        case "json_object":
            return Form({"type": "json"}, origin)
        case "choice":
            return Form({"type": "regex", "text": "|".join(map(re.escape, value))}, origin)
    guide = {"json": "json_schema", "grammar": "ebnf_grammar"}.get(kind, kind)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Form({"type": guide, "text": text}, origin)


def form_of(format: Format | None, field: str) -> Form | None:
    """The form of an answer for a format, which the client sent as `field`; None for plain text."""
    match format:
        case None | TextFormat():
            return None
        case JsonObjectFormat(schema_=None):
            return Form({"type": "json"}, GuideOrigin(field))
        case JsonObjectFormat():
            return _of_schema(format, f"{field}.schema")
        case JsonSchemaFormat():
            return _of_schema(format.json_schema, f"{field}.json_schema.schema")
        case SchemaFormat():
            return _of_schema(format, f"{field}.schema")
    assert_never(format)


def _of_schema(schema: JsonSchema | JsonObjectFormat, field: str) -> Form:
    """Without a schema any JSON object will do."""
    origin = GuideOrigin(field, OF_SCHEMAS)
    if schema.schema_ is None:
        return Form({"type": "json"}, origin)
    return Form({"type": "json_schema", "text": msgspec.json.encode(schema.schema_).decode()}, origin)


def shown_format(format: Format | None) -> dict[str, Any]:
    """The format as an answer repeats it."""
    return {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
