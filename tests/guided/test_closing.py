"""Arguments of declared keys only: with each library, and none where the schema speaks of further ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guided.test_loosening import LIBRARIES, NUMBER, TEXT, allows, compiled

A = {"type": "object", "properties": {"a": NUMBER}}
NAMED = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
# A schema -> arguments that stay possible, and ones that it allows by itself and a forced call may not have.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (A, [{"a": 1}, {}], [{"b": 1}, {"a": 1, "b": 2}, '{"a": 1, "a": 2}', '{"b": 1, "b": 2}']),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "nested": ({"type": "object", "properties": {"x": NAMED}}, [{"x": {"name": "y"}}], [{"x": {"name": "y", "b": 1}}]),
    "in a list": (
        {"type": "object", "properties": {"x": {"type": "array", "items": A}}},
        [{"x": [{"a": 1}]}],
        [{"x": [{"b": 1}]}],
    ),
    "behind a $ref": (
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": NAMED}},
        [{"x": {"name": "y"}}],
        [{"x": {"name": "y", "b": 1}}],
    ),
    "a tree": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}},
        [{"t": {"t": {}}}],
        [{"t": {"u": {}}}, {"u": 1}],
    ),
    "a $ref behind a $ref, and both again": (
        {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/{key[0]}"} for key in ("o1", "n1", "o2", "n2")},
            "$defs": {"n": NAMED, "o": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}},
        },
        [{"o1": {"x": {"name": "y"}}, "n1": {"name": "y"}, "o2": {"x": {"name": "y"}}, "n2": {"name": "y"}}],
        [{"o1": {"x": {"name": "y", "b": 1}}}, {"o1": {"x": {"name": "y"}, "b": 1}}, {"n2": {"name": "y", "x": {}}}],
    ),
    "or null": (
        {"type": "object", "properties": {"x": {"anyOf": [NAMED, {"type": "null"}]}}},
        [{"x": {"name": "y"}}, {"x": None}],
        [{"x": {"name": "y", "b": 1}}],
    ),
}
# llguidance holds allOf too.
JOINED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "allOf": (
        {"type": "object", "allOf": [A, NAMED]},
        [{"a": 1, "name": "x"}, {"name": "x"}],
        [{"a": 1, "name": "x", "b": 1}],
    ),
    "anyOf beside properties": (
        {**A, "anyOf": [{"properties": {"b": TEXT}}, {"required": ["a"]}]},
        [{"a": 1, "b": "x"}, {"a": 1}],
        [{"a": 1, "c": 1}],
    ),
    "what is required of an if": (
        {**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        [{"a": 1, "b": 1}],
        [{"a": 1, "c": 1}],
    ),
}
OPEN: dict[str, tuple[dict[str, Any], Any]] = {
    "additionalProperties": ({**A, "additionalProperties": True}, {"a": 1, "b": 1}),
    "a schema of them": ({**A, "additionalProperties": TEXT}, {"a": 1, "b": "x"}),
    "patternProperties": ({**A, "patternProperties": {"^b$": NUMBER}}, {"a": 1, "b": 1}),
    "no properties declared": ({"type": "object"}, {"b": 1}),
    "only required": ({"type": "object", "required": ["b"]}, {"b": 1}),
    "an external $ref": ({**A, "allOf": [{"$ref": "https://example.org/x"}]}, {"a": 1, "b": 1}),
    "a map within": ({"type": "object", "properties": {"x": {"type": "object"}}}, {"x": {"b": 1}}),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("form", CLOSED | JOINED)
def test_a_forced_call_has_declared_keys_only(form: str, name: str) -> None:
    schema, right, wrong = (CLOSED | JOINED)[form]
    guide = compiled(name, schema, closed=True)
    assert all(allows(guide, value) for value in right)
    assert not any(allows(guide, value) for value in wrong)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("form", OPEN)
def test_where_further_keys_are_spoken_of_they_may_come(form: str, name: str) -> None:
    schema, value = OPEN[form]
    assert allows(compiled(name, schema, closed=True), value)


@pytest.mark.parametrize("form", CLOSED)
def test_a_call_that_is_not_forced_may_have_what_its_schema_allows(form: str) -> None:
    schema, right, wrong = CLOSED[form]
    guide = compiled("llguidance", schema)
    assert all(allows(guide, value) for value in right)
    assert any(allows(guide, value) for value in wrong)
