"""Schemas: what is accepted is what JSON Schema accepts, and keywords that are not held are refused by name."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from backend.guided.protocol import GuideError
from tests.guided.tools import accepts, compiled

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
# schema, instances; which of them are valid is asked of the package jsonschema
CASES: list[tuple[dict[str, Any], list[Any]]] = [
    (OBJECT, [{"a": 1}, {"a": 1.5}, {}, {"a": 1, "b": 2}, {"a": "1"}, [1], None]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "abc", "abcd", "\u00e4\u00f6"]),
    ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 2}, ["a", "abc", "d", "ab"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, [2, 3, 12, 13, 3.5]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, 8, 14]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[], [True], [True] * 3, [1]]),
    ({"enum": ["x", 1, None, {"k": [1]}]}, ["x", "y", 1, 2, None, {"k": [1]}, {"k": []}]),
    ({"const": {"k": "v"}}, [{"k": "v"}, {"k": "w"}, "k"]),
    ({"anyOf": [{"type": "null"}, {"type": "string"}]}, [None, "a", 1]),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, [4, 5, 5.5]),
    ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, [[], [[], [[]]], [1]]),
    ({"prefixItems": [{"type": "integer"}], "items": False, "type": "array"}, [[1], [1, 2], ["a"]]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}, {"x": "1"}, {}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
     [{"x1": 1}, {"x1": "a"}, {"y": 1}]),
]  # fmt: skip


@pytest.mark.feature("000-45")
@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:50])
def test_what_is_accepted_is_what_the_schema_says(case: tuple[dict[str, Any], list[Any]]) -> None:
    schema, instances = case
    guide = compiled("json_schema", json.dumps(schema))
    judge = jsonschema.Draft202012Validator(schema)
    verdicts = [judge.is_valid(instance) for instance in instances]
    assert True in verdicts and False in verdicts, "the case judges nothing"
    for spacing in ((",", ":"), (", ", ": ")):
        told = [accepts(guide, json.dumps(each, separators=spacing, ensure_ascii=False)) for each in instances]
        assert told == verdicts, spacing


# Each keyword with an instance that it forbids: it must be refused by its name, or the instance be rejected.
FORBIDDEN: dict[str, tuple[dict[str, Any], Any]] = {
    "not": ({"not": {"type": "string"}}, "a"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "abc"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "contains": {"type": "string"}}, [1]),
    "minContains": ({"type": "array", "contains": {"type": "string"}, "minContains": 2}, ["a"]),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "minProperties": ({"type": "object", "minProperties": 2}, {"a": 1}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    "unevaluatedProperties": ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"b": 1}),
    "unevaluatedItems": ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [1, 2]),
    "format": ({"type": "string", "format": "date"}, "soon"),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1}, 1),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 5),
    "$dynamicRef": ({"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "type": "null"}}}, 1),
    "additionalItems": ({"type": "array", "items": [{}], "additionalItems": False}, [1, 2]),
    "pattern beside format": ({"type": "string", "format": "date", "pattern": "^20"}, "1999-01-01"),
}


@pytest.mark.parametrize("keyword", FORBIDDEN)
def test_no_keyword_is_dropped(keyword: str) -> None:
    """It is held, which the rejected instance shows, or refused with its name, or that of what it stands beside."""
    schema, instance = FORBIDDEN[keyword]
    try:
        guide = compiled("json_schema", json.dumps(schema))
    except GuideError as error:
        assert any(word in str(error) for word in (*keyword.split(), "Unimplemented", "unsupported", "not supported"))
        return
    assert not accepts(guide, json.dumps(instance, separators=(",", ":")))


def _days(year: int) -> Iterator[str]:
    """What might be a day of the year: up to one day and one month more than there are."""
    yield from (f"{year:04}-{month:02}-{day:02}" for month in range(14) for day in range(33))


def _is_date(text: str) -> bool:
    try:
        return text == datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        return False


FORMS = {
    "date": ({}, "{}"),
    "date beside a pattern": ({"format": "date", "pattern": "^[0-9]", "allOf": [{"minLength": 3}]}, "{}"),
    "date-time": ({}, "{}T10:00:00Z"),
}


@pytest.mark.parametrize("form", FORMS)
def test_dates_are_those_of_the_calendar(form: str) -> None:
    """Beside Python's datetime: leap years (2000, 2004, not 1900, 2100), and no year 0."""
    more, text = FORMS[form]
    guide = compiled("json_schema", json.dumps({"type": "string", "format": form, **more}))
    judge = jsonschema.Draft202012Validator({"type": "string", **more})
    for year in (0, 1, 1900, *range(1999, 2005), 2023, 2100, 2400, 9999):
        days = (
            list(_days(year)) if year in (0, 1900, 2000, 2023) else [f"{year:04}-02-{day:02}" for day in range(27, 31)]
        )
        for day in days:
            assert judge.is_valid(day)
            assert accepts(guide, json.dumps(text.format(day))) == _is_date(day), day
    for other in ("2024-2-29", "2024-02-29 ", "24-02-29", "x2024-02-29"):
        assert not accepts(guide, json.dumps(text.format(other))), other


TIMES = {
    "00:00:00Z": True,
    "23:59:60z": True,
    "19:09:59.123456789+23:59": True,
    "20:00:00-00:00": True,
    "24:00:00Z": False,
    "25:00:00Z": False,
    "10:60:00Z": False,
    "10:00:61Z": False,
    "10:00:00": False,
    "10:00:00.Z": False,
    "10:00:00+24:00": False,
    "10:00:00+10:60": False,
    "10:00:00+1000": False,
    "1:00:00Z": False,
    "10:00Z": False,
}


@pytest.mark.parametrize("between", ["T", "t", " "])
def test_times_are_those_of_a_day(between: str) -> None:
    """As RFC 3339 has them: hours to 23, a second 60, and an offset always."""
    guide = compiled("json_schema", '{"type": "string", "format": "date-time"}')
    for text, is_one in TIMES.items():
        assert accepts(guide, f'"2024-02-29{between}{text}"') == (is_one and between != " "), text


def test_dates_are_held_wherever_a_schema_stands_and_in_no_value() -> None:
    """Behind a $ref into a keyword that nobody knows; but a property `format`, or an object in enum, is no keyword."""
    behind = {"$ref": "#/own/day", "own": {"day": {"type": "string", "format": "date"}}}
    for schema in (behind, {"anyOf": [behind["own"]["day"]]}):
        guide = compiled("json_schema", json.dumps(schema))
        assert accepts(guide, '"2024-02-29"') and not accepts(guide, '"2023-02-29"')
    day = {"format": "date"}
    for schema in ({"enum": [day]}, {"const": day}, {"type": "object", "properties": {"format": {"const": "date"}}}):
        assert accepts(compiled("json_schema", json.dumps(schema)), '{"format":"date"}')
    assert accepts(compiled("json_schema", json.dumps(day)), "5"), "a format says something of texts only"
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": behind["own"]["day"], "end": ">"}]}
    guide = compiled("structural_tag", json.dumps(tag))
    assert accepts(guide, '<"2024-02-29">') and not accepts(guide, '<"2023-02-29">')


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(GuideError, match="format: positiveInteger"):
        compiled("json_schema", '{"type": "string", "format": "positiveInteger"}')


def test_a_client_cannot_have_keywords_dropped_by_an_option_of_the_library() -> None:
    lenient = {"not": {"type": "string"}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    with pytest.raises(GuideError, match="not"):
        compiled("json_schema", json.dumps(lenient))
    flexible = {**OBJECT, "x-guidance": {"whitespace_pattern": "[ ]*"}}
    assert not accepts(compiled("json_schema", json.dumps(flexible)), '{"a":      1}')


def test_whitespace_is_bounded() -> None:
    """One space, or a line break with an indentation; nothing ahead of the value or behind it."""
    guide = compiled("json_schema", json.dumps(OBJECT))
    assert accepts(guide, '{"a": 1}') and accepts(guide, '{\n  "a": 1\n}')
    for text in ('{"a":  1}', '{"a":\n\n1}', '{"a":\t1}', ' {"a":1}', '{"a":1} ', "{\n" + " " * 33 + '"a":1}'):
        assert not accepts(guide, text), text


def test_a_guide_of_type_json_is_any_object() -> None:
    guide = compiled("json", "")
    assert accepts(guide, '{"a": [1, null, {"b": "c"}]}') and accepts(guide, "{}")
    assert not accepts(guide, "[1]") and not accepts(guide, '{"a" 1}')


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no JSON"),
        ("[]", r"the schema is \[\], an object is needed"),
        ("false", "nothing satisfies"),
        ("true", "the schema is true, which any value satisfies; use type json"),
        ('{"type": "string", "type": "integer"}', "'type' twice"),
        ('{"minimum": NaN}', "NaN"),
        ('{"type": "integer", "minimum": 5, "maximum": 4}', ""),
        ('{"$ref": "#"}', ""),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}', ""),
        ('{"$ref": "https://example.org/schema"}', ""),
        ('{"type": "strin"}', ""),
    ],
)
def test_a_bad_schema_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(GuideError, match=sentence) as caught:
        compiled("json_schema", text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
