"""The parts of a JSON schema, each with its place; and rewritings for single libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")  # name -> schema
_OF_VALUES = ("enum", "const")  # their values are data, even if they look like schemas
_PLAIN = re.compile(r"[\w$-]+")

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # two digits that 4 divides, other than 00
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 0001 to 9999
_DAY = (
    "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"  # all but 02-29
)
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"  # leap days of the Gregorian calendar
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# llguidance has a February of 29 days in every year, and a year 0000. These say what the formats do (RFC 3339, years from 1).
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}


class SchemaPart(NamedTuple):
    place: str  # as in `properties.a.anyOf[0]`; '' is the whole schema
    schema: dict[str, Any]


def parts(schema: Any, place: str = "") -> Iterator[SchemaPart]:
    """A schema and the schemas in it, also in keywords that are not known, for a $ref may lead there."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from parts(each, f"{place}[{i}]")
    if not isinstance(schema, dict):
        return
    yield SchemaPart(place, schema)
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            for name, each in value.items():
                yield from parts(each, beyond(beyond(place, key), name))
        elif key not in _OF_VALUES:
            yield from parts(value, beyond(place, key))


def hold_formats(schema: Any) -> None:
    """Put patterns in place of the formats that llguidance holds too widely."""
    for _, part in list(parts(schema)):
        format = part.get("format")
        if not isinstance(format, str) or format not in _PATTERNS:
            continue
        others = part.get("allOf", [])
        if "pattern" not in part:
            part["pattern"] = _PATTERNS[part.pop("format")]
        elif isinstance(others, list):
            part["allOf"] = [*others, {"pattern": _PATTERNS[part.pop("format")]}]


def open_parts(schema: Any) -> None:
    """Say that objects and arrays may have further parts where a schema says nothing of them: xgrammar would close them."""
    for _, part in list(parts(schema)):
        types = part.get("type")
        listed = types if isinstance(types, list) else [types]
        if "properties" in part or "object" in listed:
            part.setdefault("additionalProperties", True)
        if "prefixItems" in part or "array" in listed:
            part.setdefault("items", True)


def beyond(place: str, key: str) -> str:
    """The place of what a key leads to."""
    if not _PLAIN.fullmatch(key):
        return f"{place}[{json.dumps(key, ensure_ascii=False)[:80]}]"
    return f"{place}.{key[:80]}" if place else key[:80]
