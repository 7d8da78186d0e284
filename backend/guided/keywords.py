"""The keywords of JSON Schema, drafts 3 to 2020-12: which values they take, what says nothing, and which schemas lie in them.

A key that is not in the table is none of JSON Schema's, and says nothing.
"""

from __future__ import annotations

import enum
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from backend.guided.protocol import GuideError

Schema = dict[str, Any]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ENDLESS = (1 << 31) - 1  # no output has as many characters, items or properties; int's greatest value says "any number"
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "then", "else", "dependentSchemas")
_ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
)
_OF_CONTENT = ("contentMediaType", "contentEncoding", "contentSchema")
# Formats that say how a value is stored or shown, and forbid no text: OpenAPI's registry, and what generators of schemas write.
SHOWN_FORMATS = frozenset(
    "int8 int16 int32 int64 uint uint8 uint16 uint32 uint64 float double decimal decimal128 byte binary file password "
    "text textarea html markdown commonmark color multi-line single-line".split()
)


class Inside(enum.Enum):
    """The schemas in the value of a keyword."""

    NOTHING = enum.auto()
    SCHEMA = enum.auto()
    LIST = enum.auto()  # a list of them
    NAMED = enum.auto()  # an object whose values they are
    EITHER = enum.auto()  # one, or a list of them


class Keyword(NamedTuple):
    fits: Callable[[Any], bool]  # the value has the form that JSON Schema asks for
    is_idle: Callable[[Any, Schema], bool]  # it allows every value, beside the other keywords of its schema
    inside: Inside = Inside.NOTHING


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def is_number(value: Any) -> bool:
    """A number that doubles hold: 10**400 is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def is_open(value: Any) -> bool:
    """True for the schemas that plainly allow everything."""
    return value is True or value == {}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(each, str) and each in TYPES for each in listed)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_schema, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _anything(value: Any) -> bool:
    return True


def _never(value: Any, schema: Schema) -> bool:
    return False


def _always(value: Any, schema: Schema) -> bool:
    return True


def _least(value: Any, schema: Schema) -> bool:
    return bool(value == 0)


def _most(value: Any, schema: Schema) -> bool:
    return bool(value >= ENDLESS)


def _fewest_properties(value: Any, schema: Schema) -> bool:
    required: Any = schema.get("required")
    return bool(value <= (len(set(required)) if _are_texts(required) else 0))


def _most_properties(value: Any, schema: Schema) -> bool:
    named = schema.get("properties", {})
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return bool(value >= ENDLESS or (is_closed and isinstance(named, dict) and len(named) <= value))


def _no_text_format(value: Any, schema: Schema) -> bool:
    """Formats are of texts."""
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    return (isinstance(value, str) and value in SHOWN_FORMATS) or ("string" not in listed and types is not None)


def _no_names(value: Any, schema: Schema) -> bool:
    """True for a schema that every name satisfies, for a name is a text."""
    return value is True or (
        isinstance(value, dict) and (value.get("type", "string") == "string" and value.keys() <= _SHOWN)
    )


def _nothing_depends(value: Any, schema: Schema) -> bool:
    return isinstance(value, dict) and all(each == [] or is_open(each) for each in value.values())


def _without(*partners: str) -> Callable[[Any, Schema], bool]:
    """A keyword that says nothing where none of these stands beside it."""
    return lambda value, schema: is_open(value) or not any(partner in schema for partner in partners)


def _is_unique(value: Any, schema: Schema) -> bool:
    most: Any = schema.get("maxItems")
    return value is False or (is_number(most) and most <= 1)


_SHOWN = frozenset({"type", *_ANNOTATIONS})
_COUNT, _NAMED = Keyword(_is_count, _least), Keyword(_is_object, _never, Inside.NAMED)
_MOST, _BOUND = Keyword(_is_count, _most), Keyword(is_number, _never)
_ONE, _SOME = (
    Keyword(is_schema, lambda value, _: is_open(value), Inside.SCHEMA),
    Keyword(_are_schemas, _never, Inside.LIST),
)

KEYWORDS: dict[str, Keyword] = {
    **dict.fromkeys((*_ANNOTATIONS, *_OF_CONTENT, "$schema", "$vocabulary", "id"), Keyword(_anything, _always)),
    **dict.fromkeys(("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"), Keyword(_anything, _never)),
    **dict.fromkeys(("$defs", "definitions", "properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SOME),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), Keyword(_is_text, _never)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("minLength", "minItems"), _COUNT),
    **dict.fromkeys(("maxLength", "maxItems"), _MOST),
    "type": Keyword(_are_types, _never),
    "enum": Keyword(lambda value: isinstance(value, list) and bool(value), _never),
    "const": Keyword(_anything, _never),
    "required": Keyword(_are_texts, lambda value, _: value == []),
    "additionalProperties": _ONE,
    "minProperties": Keyword(_is_count, _fewest_properties),
    "maxProperties": Keyword(_is_count, _most_properties),
    "propertyNames": Keyword(is_schema, _no_names),
    "unevaluatedProperties": Keyword(is_schema, lambda value, _: is_open(value)),
    "items": Keyword(lambda value: is_schema(value) or _are_schemas(value), lambda value, _: is_open(value), Inside.EITHER),
    "prefixItems": _SOME,
    "additionalItems": Keyword(
        is_schema, lambda value, schema: is_open(value) or not isinstance(schema.get("items"), list), Inside.SCHEMA
    ),
    "unevaluatedItems": Keyword(is_schema, lambda value, _: is_open(value)),
    "contains": Keyword(is_schema, lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema),
    "minContains": Keyword(_is_count, _without("contains")),
    "maxContains": Keyword(_is_count, _without("contains")),
    "uniqueItems": Keyword(lambda value: isinstance(value, bool), _is_unique),
    "multipleOf": Keyword(lambda value: is_number(value) and value > 0, _never),
    "pattern": Keyword(_is_text, lambda value, _: value in ("", ".*", "^.*")),
    "format": Keyword(_is_text, _no_text_format),
    "not": Keyword(is_schema, lambda value, _: value is False),
    "if": Keyword(is_schema, _without("then", "else")),
    "then": Keyword(is_schema, _without("if")),
    "else": Keyword(is_schema, _without("if")),
    "dependentRequired": Keyword(_is_object, _nothing_depends),
    "dependentSchemas": Keyword(_is_object, _nothing_depends),
    "dependencies": Keyword(_is_object, _nothing_depends),
}  # fmt: skip


def parse_json(text: str) -> Any:
    """Raises GuideError for what is no JSON, has a key twice in one object, or a number that JSON does not have."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise GuideError(f"it has the key {twice[:80]!r} twice in one object; remove one")
        return found

    def refuse(name: str) -> NoReturn:
        raise GuideError(f"it holds {name}, which is no JSON; remove it")

    try:
        return json.loads(text, object_pairs_hook=members, parse_constant=refuse)
    except GuideError:
        raise
    except (ValueError, RecursionError) as error:
        raise GuideError(f"it is no JSON ({str(error)[:120]}); correct it") from None


def check_schema(schema: Any, place: str = "") -> None:
    """Raise GuideError for a schema that is neither an object nor true; `place`: where it stands in the guide."""
    if schema is False:
        raise GuideError("the schema is false, which nothing satisfies; give another", place)
    if schema is not True and not isinstance(schema, dict):
        raise GuideError(f"the schema is {json.dumps(schema)[:80]}, an object is needed; correct it", place)
