"""Guides in the form of vLLM's `structured_outputs`: a JSON object, or its text, with exactly one of the keys of _TYPES."""

from __future__ import annotations

import json
from typing import Any

from backend.api import InvalidRequest
from backend.api.guide import Guide, GuideType, choice_guide

_TYPES = {
    "json": GuideType.JSON_SCHEMA,
    "regex": GuideType.REGEX,
    "choice": GuideType.REGEX,
    "grammar": GuideType.EBNF_GRAMMAR,
    "json_object": GuideType.JSON,
    "structural_tag": GuideType.STRUCTURAL_TAG,
}
# keys that choose how vLLM works, without effect on the output
_HINTS = (
    "backend",
    "disable_any_whitespace",
    "disable_fallback",
    "disable_additional_properties",
    "whitespace_pattern",
)


def read_guide(name: str, given: Any) -> Guide | None:
    """The guide in a value. `name`: of the parameter, for errors. Raises InvalidRequest for another form."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{name} is not valid JSON; send one JSON object") from None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} is a {type(given).__name__}, a JSON object is expected")
    unknown = sorted(set(given) - set(_TYPES) - set(_HINTS))
    if unknown:
        raise InvalidRequest(f"{name} holds the key {unknown[0][:80]!r}, allowed are {', '.join(_TYPES)}")
    for hint in _HINTS:
        if given.get(hint):
            raise InvalidRequest(f"{name}.{hint} is not served by this version; leave it out")
    asked = {key: given[key] for key in _TYPES if given.get(key) not in (None, False, "")}
    if len(asked) > 1:
        raise InvalidRequest(f"{name} holds {' and '.join(asked)}, one of them is expected")
    return next((_guide(name, key, value) for key, value in asked.items()), None)


def _guide(name: str, key: str, value: Any) -> Guide:
    return choice_guide(f"{name}.choice", value) if key == "choice" else Guide(_TYPES[key], _text(name, key, value))


def _text(name: str, key: str, value: Any) -> str:
    if key == "json_object":
        if value is not True:
            raise InvalidRequest(f"{name}.json_object is no bool; send true")
        return ""
    if key in ("json", "structural_tag") and isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} is a {type(value).__name__}, text is expected")
    return value
