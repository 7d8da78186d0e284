"""Schemas that the benchmarks decode under: each ends by itself within a few hundred tokens."""

from __future__ import annotations

from typing import Any

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90},
                    "at": {"format": "date-time", "type": "string"},
                },
                "required": ["lat", "at"],
                "additionalProperties": False,
            },
            "ok": {"type": "boolean"},
            "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 30}]},
        },
        "required": ["place", "ok", "note"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                "n": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}},
            "required": ["id", "n"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 4,
    },
    {"enum": ["yes", "no", {"maybe": [1, 2.5, None]}]},
]  # fmt: skip
