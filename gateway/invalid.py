"""Sentences for requests that do not fit the messages: which parameter, its value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import pydantic

from gateway.errors import GatewayError
from gateway.messages import Wire

LONGEST_VALUE = 80
_GUIDED = "asks for guided decoding, which is not there yet; leave it out"
_TEXT_ONLY = "is not served: the models read and write text only; leave it out"
_NOT_HERE = "is not served here; leave it out"
REFUSED = {
    "response_format": f'other than {{"type": "text"}} {_GUIDED}',
    "text": f'other than {{"format": {{"type": "text"}}}} {_GUIDED}',
    "tools": _GUIDED,
    "tool_choice": f'other than "none" or "auto" {_GUIDED}',
    "functions": _GUIDED,
    "function_call": f'other than "none" or "auto" {_GUIDED}',
    "tool_calls": _GUIDED,
    "modalities": f'other than ["text"] {_TEXT_ONLY}',
    "audio": _TEXT_ONLY,
    "suffix": _NOT_HERE,
    "prediction": _NOT_HERE,
    "web_search_options": _NOT_HERE,
    "reasoning": _NOT_HERE,
    "reasoning_effort": f'other than "none" {_NOT_HERE}',
    "background": "true is not served here; leave it out",
    "conversation": "is not served here; use previous_response_id",
    "truncation": 'other than "disabled" is not served here; send less input',
    "prompt_logprobs": _NOT_HERE,
}
_REFUSED_IN_MESSAGES = ("tool_calls", "function_call", "audio")
_Message = TypeVar("_Message", bound=Wire)


def parse(kind: type[_Message], body: bytes) -> _Message:
    """The message in a JSON body. Raises GatewayError(400) that names the first thing that is wrong."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        fields = _field_names(kind)
    raise _refusal(found, fields)


def _refusal(found: list[Any], fields: set[str]) -> GatewayError:
    if found[0]["type"] == "json_invalid":
        return GatewayError(400, f"the body is not valid JSON: {_detail(found[0]['msg'])}", code="invalid_json")
    worst = max(found, key=lambda error: _rank(error, fields))
    path = _path(worst["loc"], fields)
    name = _dotted(path)
    known = _refused(path)
    if known is not None:
        return GatewayError(400, f"{known} {REFUSED[known]}", name, "unsupported_parameter")
    if worst["type"] == "extra_forbidden":
        return GatewayError(400, f"unknown parameter {name}; leave it out", name, "unknown_parameter")
    if worst["type"] == "missing":
        return GatewayError(400, f"{name} is missing", name, "missing_required_parameter")
    if not name:
        return GatewayError(400, "the body is no JSON object", code="invalid_json")
    where = f"{name} is {_shown(worst['input'])}"
    return GatewayError(400, f"{where}; {_allowed(found, worst, fields)}", name, "invalid_value")


def _refused(path: list[int | str]) -> str | None:
    """The parameter of REFUSED that a path leads to: one of the request, or one of an earlier answer's message."""
    if path and path[0] in REFUSED:
        return str(path[0])
    return next((str(part) for part in path if part in _REFUSED_IN_MESSAGES), None)


def _rank(error: Any, fields: set[str]) -> tuple[bool, bool, int]:
    """Which of several errors says most: a part of another type, an unknown key, then the one that lies deepest."""
    path = _path(error["loc"], fields)
    other_type = error["type"] == "literal_error" and path[-1:] == ["type"]
    return other_type, error["type"] == "extra_forbidden", len(path)


def _allowed(found: list[Any], worst: Any, fields: set[str]) -> str:
    """Everything that could stand in this place, of all the forms that were tried."""
    path = _path(worst["loc"], fields)
    sentences = [_detail(error["msg"]) for error in found if _path(error["loc"], fields) == path]
    return ", or ".join(dict.fromkeys(sentences))


def _detail(sentence: str) -> str:
    sentence = sentence[:300].replace("Input should", "it should").replace("valid array", "valid list")
    return sentence[:1].lower() + sentence[1:]


def _path(location: Iterable[int | str], fields: set[str]) -> list[int | str]:
    """Of pydantic's location the names and indices that the client wrote: without the forms that were tried."""
    parts = [part for part in location if part != "[key]"]
    kept = [part for part in parts[:-1] if isinstance(part, int) or part in fields]
    return kept + [part for part in parts[-1:] if isinstance(part, int) or part in fields or not _is_form(part)]


def _is_form(part: str) -> bool:
    return bool(re.fullmatch(r"(str|int|float|bool|none|literal|constrained-\w+|\w+\[.*\]|function-.*|[A-Z]\w+)", part))


def _dotted(path: list[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[: LONGEST_VALUE + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def _field_names(kind: type[pydantic.BaseModel]) -> set[str]:
    """The names of all fields of a message and of the messages in it."""
    return _names_in(kind.model_json_schema())


def _names_in(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for part in schema for name in _names_in(part)}
    if not isinstance(schema, dict):
        return set()
    names = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return names | {name for part in schema.values() for name in _names_in(part)}
