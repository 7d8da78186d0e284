"""Schemas that need not be held in full: whatever they are, they compile, and everything that they allow stays possible."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from backend.api.guide import Guide, GuideType
from backend.guided.compile_jobs import backend_maker
from backend.guided.held import Held, _schemas, compile_held
from backend.guided.holdable import LLGUIDANCE, XGRAMMAR
from backend.guided.keywords import KEYWORDS
from backend.guided.loosening import Loosening
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError
from backend.guided.regexes import without_lookaround
from backend.guided.vocabulary import Vocabulary
from tests.guided.test_xgrammar import IS_INSTALLED
from tests.guided.tools import VOCAB, accepts, info
from tests.guided.tools import backend as llguidance

LIBRARIES = ["llguidance", *(["xgrammar"] if IS_INSTALLED else [])]
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
RECORD = {"propertyNames": TEXT, "additionalProperties": {}}  # as zod's z.record() writes it
MANY = {f"option_{i}": TEXT for i in range(160)}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@cache
def library(name: str) -> GuideBackend:
    return llguidance() if name == "llguidance" else backend_maker(name)(Vocabulary.of(info(), VOCAB))


def compiled(name: str, schema: Any, hold: str | None = "most", **further: Any) -> CompiledGuide:
    structure = {"begin": "<", "schema": schema, "end": ">", **further} | ({} if hold is None else {"hold": hold})
    tag = {"triggers": ["<"], "structures": [structure]}
    return library(name).compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag)))


def allows(guide: CompiledGuide, value: Any) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return accepts(guide, f"<{text}>")


# A schema -> arguments that satisfy it, arguments that stay forbidden (with llguidance), and the keyword that is noted.
LOOSE: dict[str, tuple[dict[str, Any], list[Any], list[Any], str]] = {
    "look-ahead": (of(a={**TEXT, "pattern": "^(?!x)[a-z]+$"}), [{"a": "abc"}], [{"a": "ABC"}], "pattern"),
    "back-reference": (of(a={**TEXT, "pattern": r"^(a)\1$"}), [{"a": "aa"}], [{"a": 1}], "pattern"),
    "oneOf of more branches than a library takes": (
        of(a={"oneOf": [{"const": i} for i in range(300)]}),
        [{"a": 5}],
        [{"b": 5}, {}],
        "oneOf",
    ),
    "uniqueItems": (
        of(a={"type": "array", "items": TEXT, "uniqueItems": True}),
        [{"a": ["x"]}],
        [{"a": [1]}],
        "uniqueItems",
    ),
    "not": (of(a={**TEXT, "not": {"const": ""}}), [{"a": "x"}], [{"a": 1}], "not"),
    "if": (
        {
            **of(a=TEXT, b=TEXT),
            "required": ["a"],
            "if": {"properties": {"a": {"const": "x"}}},
            "then": {"required": ["b"]},
        },
        [{"a": "y"}, {"a": "x", "b": "z"}],
        [{"a": 1}],
        "if",
    ),
    "dependentRequired": (
        {**of(a=TEXT), "dependentRequired": {"a": ["b"]}, "additionalProperties": True},
        [{"a": "x", "b": 1}],
        [{"a": 1}],
        "dependentRequired",
    ),
    "contains": (of(a={"type": "array", "contains": TEXT}), [{"a": [1, "x"]}], [{"a": []}], "contains"),
    "format": (of(a={**TEXT, "format": "city-name"}), [{"a": "Oslo"}], [{"a": 1}], "format"),
    "oneOf that overlaps": (of(a={"oneOf": [NUMBER, {"type": "number"}]}), [{"a": 1.5}], [{"a": "x"}], "oneOf"),
    "oneOf with a part that is loosened": (
        of(a={"oneOf": [{**TEXT, "not": {"const": "x"}}, {**TEXT, "maxLength": 1}]}),
        [{"a": "x"}],
        [{"a": 1}],
        "not",
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^(?!x)": NUMBER}, "additionalProperties": False},
        [{"y": 1}],
        [[1]],
        "patternProperties",
    ),
    "external $ref": (
        of(a={"$ref": "https://example.org/x.json"}, b=NUMBER),
        [{"a": [1], "b": 1}],
        [{"a": 1, "b": "x"}],
        "$ref",
    ),
    "$ref to nothing": (of(a={"$ref": "#/$defs/none"}), [{"a": 1}], [[1]], "$ref"),
    "$dynamicRef": (
        {**of(a={"$dynamicRef": "#n"}), "$defs": {"n": {"$dynamicAnchor": "n", **NUMBER}}},
        [{"a": 1}],
        [[1]],
        "$dynamicRef",
    ),
    "behind a $ref into a key of one's own": (
        {**of(a={"$ref": "#/components/schemas/A"}), "components": {"schemas": {"A": {**TEXT, "not": {"const": "x"}}}}},
        [{"a": "y"}],
        [{"a": 1}],
        "not",
    ),
    "many optional properties": (
        {"type": "object", "properties": MANY},
        [{"option_3": "x", "option_159": "y"}],
        [{"option_3": 1}],
        "",
    ),
    "many of as many schemas": (
        {"type": "object", "properties": {f"o{i}": {**TEXT, "maxLength": i + 9} for i in range(160)}},
        [{"o3": "x", "o159": "y"}],
        [{"o3": 1}],
        "properties",
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": NUMBER}, "minProperties": 1},
        [{"a": 1}],
        [{"a": "x"}],
        "minProperties",
    ),
    "nothing satisfies a part": (
        of(a={"type": "integer", "minimum": 5, "maximum": 4}, b=NUMBER),
        [],
        [{"a": 1, "b": "x"}],
        "",
    ),
    "enum beside another type": (of(a={"type": "string", "const": 5}), [], [[1]], ""),
    "required null": (
        {"type": "object", "properties": {"a": NUMBER}, "required": None},
        [{"a": 1}],
        [{"a": "x"}],
        "required",
    ),
    "required of draft 3": (of(a={**TEXT, "required": True}), [{"a": "x"}], [{"a": 1}], "required"),
    "properties as a list": ({"type": "object", "properties": [TEXT]}, [{"a": "x"}], [[1]], "properties"),
    "a misspelled type": (of(a={"type": "strng"}, b=NUMBER), [{"a": "x", "b": 1}], [{"a": "x", "b": "y"}], "type"),
    "another root": ({"type": "strng", "properties": {"a": NUMBER}}, [{"a": 1}], [[1]], "type"),
    "a property null": (of(a=None, b=NUMBER), [{"a": 5, "b": 1}], [{"a": 5, "b": "x"}], "schema"),
    "a schema that leads to itself": ({"$ref": "#"}, [{"a": 1}], [[1]], ""),
    "a range beyond 64 bits": (
        of(a={"type": "integer", "minimum": -(10**30), "maximum": 10**30}),
        [{"a": 7}],
        [{"a": "x"}],
        "minimum",
    ),
    "items as texts": (of(a={"type": "array", "items": "string"}), [{"a": ["x"]}], [{"a": 1}], "items"),
    "an own $schema": (
        {**of(a=NUMBER), "$schema": "http://example.org/mine", "$id": "no uri %%"},
        [{"a": 1}],
        [{"a": "x"}],
        "",
    ),
    "anyOf empty": (of(a={"anyOf": []}), [{"a": 1}], [[1]], "anyOf"),
    "an enum of thousands": (of(a={"enum": [f"v{i}" for i in range(3000)]}), [{"a": "v17"}], [{"a": "w"}], ""),
    "a thousand branches": (
        of(a={"anyOf": [of(k={"const": i}) for i in range(1000)]}),
        [{"a": {"k": 7}}],
        [[1]],
        "anyOf",
    ),
    "a million items": (of(a={"type": "array", "items": NUMBER, "minItems": 10**6}), [], [{"a": ["x"]}], ""),
    "allOf at the root": (
        {
            "type": "object",
            "allOf": [
                {"properties": {"a": NUMBER}, "required": ["a"]},
                {"if": {"required": ["b"]}, "then": {"required": ["c"]}},
            ],
        },
        [{"a": 1}],
        [{"a": "x"}],
        "if",
    ),
}

# What says nothing: held in full, strictly too. A schema, and arguments that it allows, and forbids.
IDLE: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "a zod record": (of(a={"type": "object", **RECORD}), [{"a": {"x": 1}}], [{"a": 1}]),
    "a zod record of numbers": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
        [{"x": 1}],
        [{"x": "1"}],
    ),
    "a record of names": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": NUMBER},
        [{"x": 1}, {}],
        [{"z": 1}, {"x": "1"}],
    ),
    "a record of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[x]+$"}, "additionalProperties": NUMBER},
        [{"xx": 1}],
        [{"z": 1}, {"x": "1"}],
    ),
    "maxLength 2^53-1": (of(a={**TEXT, "minLength": 1, "maxLength": (1 << 53) - 1}), [{"a": "x"}], [{"a": ""}]),
    "format password": (of(a={**TEXT, "format": "password"}), [{"a": "x"}], [{"a": 1}]),
    "format int32": (of(a={**NUMBER, "format": "int32"}), [{"a": 1}], [{"a": "x"}]),
    "format of no text": (of(a={**NUMBER, "format": "city-name"}), [{"a": 1}], [{"a": "x"}]),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": NUMBER}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "unevaluatedItems": (
        of(a={"type": "array", "prefixItems": [NUMBER], "unevaluatedItems": False}),
        [{"a": [1]}],
        [{"a": [1, 2]}],
    ),
    "items of draft 7": (
        of(a={"type": "array", "items": [NUMBER], "additionalItems": TEXT}),
        [{"a": [1, "x"]}],
        [{"a": [1, 2]}],
    ),
    "exclusiveMinimum of draft 4": (of(a={**NUMBER, "minimum": 3, "exclusiveMinimum": True}), [{"a": 4}], [{"a": 3}]),
    "uniqueItems false": (of(a={"type": "array", "uniqueItems": False}), [{"a": [1, 1]}], [{"a": 1}]),
    "not false": (of(a={**NUMBER, "not": False}), [{"a": 1}], [{"a": "x"}]),
    "if alone": ({**of(a=NUMBER), "if": {"required": ["b"]}}, [{"a": 1}], [{"a": "x"}]),
    "minProperties of what is required": ({**of(a=NUMBER), "minProperties": 1}, [{"a": 1}], [{}]),
    "minLength 2.0": (of(a={**TEXT, "minLength": 2.0}), [{"a": "xy"}], [{"a": "x"}]),
    "annotations": (
        {
            **of(
                a={
                    **TEXT,
                    "contentMediaType": "text/html",
                    "default": {"not": 1},
                    "examples": [{}],
                    "x-own": {"not": 1},
                }
            ),
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T",
            "$comment": "c",
        },
        [{"a": "x"}],
        [{"a": 1}],
    ),
    "siblings of a $ref in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **of(a={"$ref": "#/definitions/n", "type": "string"}),
            "definitions": {"n": NUMBER},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("form", LOOSE)
def test_what_cannot_be_held_is_loosened(form: str, name: str) -> None:
    """Never tightened: what the schema allows stays possible, and what is left of it is held."""
    schema, right, wrong, keyword = LOOSE[form]
    guide = compiled(name, schema)
    assert all(allows(guide, value) for value in right)
    if name == "llguidance":
        assert not any(allows(guide, value) for value in wrong)
        assert keyword in ({note.rpartition(": ")[2] for note in guide.notes} if keyword else {""})
    assert all(note.startswith(".structures[0].schema") for note in guide.notes)
    again = library(name).load(guide.portable)
    assert all(allows(again, value) for value in right), "as the engine has it"


@pytest.mark.parametrize("hold", ["most", None])
@pytest.mark.parametrize("form", IDLE)
def test_what_says_nothing_is_held_in_full(form: str, hold: str | None) -> None:
    schema, right, wrong = IDLE[form]
    for value, is_right in [(each, True) for each in right] + [(each, False) for each in wrong]:
        if "draft" not in form and "format" not in form:
            assert jsonschema.Draft202012Validator(schema).is_valid(value) == is_right, "the case itself"
    for name in LIBRARIES:
        if name == "xgrammar" and "record of a pattern" in form:
            continue
        guide = compiled(name, schema, hold)
        assert all(allows(guide, value) for value in right) and not guide.notes, name
        assert not any(allows(guide, value) for value in wrong), name


@pytest.mark.parametrize("form", LOOSE)
def test_strictly_nothing_is_loosened(form: str) -> None:
    """Refused in one sentence, or held in full."""
    schema, _, wrong, keyword = LOOSE[form]
    try:
        guide = compiled("llguidance", schema, None)
    except GuideError as error:
        assert error.place == ".structures[0].schema" and "\n" not in str(error) and len(str(error)) < 400
        return
    assert not keyword or form == "required of draft 3", "what is noted otherwise is refused here"
    assert not guide.notes and not any(allows(guide, value) for value in wrong)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (of(a={"not": {"const": 1}}), "it cannot be held in full: not at properties.a; leave it out"),
        (of(a={**TEXT, "pattern": "(?=x)"}), "it cannot be held in full: pattern at properties.a; leave it out"),
        ({"type": "object", "oneOf": [of(a=TEXT), of(b=TEXT)]}, "it cannot be held in full: oneOf; leave it out"),
    ],
)
@pytest.mark.skipif(not IS_INSTALLED, reason="xgrammar (requirements/xgrammar.txt) is not installed")
def test_a_library_that_drops_keywords_silently_is_not_asked(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GuideError) as caught:
        compiled("xgrammar", schema, None)
    assert (str(caught.value), caught.value.place) == (sentence, ".structures[0].schema")


@pytest.mark.parametrize(
    ("pattern", "looser"),
    [
        (r"^(?!\.)(?!.*\.\.)([a-z'+\-\.]*)[a-z]@x$", r"^([a-z'+\-\.]*)[a-z]@x$"),
        (r"(?=.*[)(])(?<!\))a", "a"),
        (r"\ba\b|[\b]", r"a|[\b]"),
        (r"(?=(a|b)+)*c", "c"),
        ("(?:a)(?P<n>b)", ""),
        ("(?=a", ""),
        (r"[(?=a)]", ""),
        (r"\(?=a\)", ""),
    ],
)
def test_a_pattern_without_what_it_looks_at(pattern: str, looser: str) -> None:
    assert without_lookaround(pattern) == looser


def test_every_keyword_of_a_library_is_one_of_json_schema_s() -> None:
    for row in (LLGUIDANCE, XGRAMMAR):
        assert row.keywords <= KEYWORDS.keys()


VALUES = [None, 5, -1, 10**400, float("inf"), "x", [], [None], {}, {"a": None}, True, False, "\ud800"]


@pytest.mark.parametrize("keyword", sorted(KEYWORDS))
def test_any_value_of_any_keyword_is_loosened(keyword: str) -> None:
    """Without an exception, and to a schema of keywords that the library holds."""
    for row in (LLGUIDANCE, XGRAMMAR):
        for value in VALUES:
            schema = {"type": "object", "properties": {"a": {keyword: value}}}
            found = Loosening(row, schema, is_strict=False).schema()
            assert found["properties"]["a"].keys() <= row.keywords | {"anyOf", "minItems"}, value


@pytest.mark.parametrize("taken", [1, 2, 3, None])
def test_the_first_form_that_is_not_refused_is_taken_or_the_last_refusal_told(taken: int | None) -> None:
    structure = {"begin": "<", "schema": of(a=TEXT), "end": ">", "hold": "most"}
    tag = {"triggers": ["<"], "structures": [structure]}
    tried: list[Held] = []

    def make(held: Held) -> int:
        tried.append(held)
        if len(tried) == taken:
            return len(tried)
        raise GuideError(f"refused for the time {len(tried)}")

    guide = Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag))
    if taken is None:
        with pytest.raises(GuideError, match="refused for the time 3"):
            compile_held(guide, LLGUIDANCE, make)
    else:
        assert compile_held(guide, LLGUIDANCE, make) == taken == len(tried)
    if len(tried) == 3:
        assert '"schema": {"type": "object"}' in tried[2].guide.text and tried[2].notes, "any object, and it is told"


def test_the_schemas_of_all_parts_are_loosened_those_of_optional_ones_too() -> None:
    structure = {"parts": [{"schema": 1}, {"optional": [{"schema": 2}, {"parts": [{"schema": 3}]}]}], "schema": 4}
    assert [(holder["schema"], place) for holder, place in _schemas(structure, "s")] == [
        (4, "s.schema"),
        (1, "s.parts[0].schema"),
        (2, "s.parts[1].optional[0].schema"),
        (3, "s.parts[1].optional[1].parts[0].schema"),
    ]
