"""The table of libraries: what each holds of JSON Schema. A new library is a row; so is what a newer version of one holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from backend.guided.keywords import Schema

_SHARED = frozenset(
    "type enum const anyOf oneOf $ref $defs definitions $id $anchor properties required additionalProperties patternProperties "
    "items prefixItems minItems maxItems minProperties maxProperties minLength maxLength pattern format minimum maximum "
    "exclusiveMinimum exclusiveMaximum multipleOf $dynamicAnchor $recursiveAnchor".split()
)
_FORMATS = frozenset("date time date-time duration email hostname ipv4 ipv6 uuid uri".split())
# A pattern that is anchored at both ends as a whole, and looks around nowhere: of others xgrammar allows more, or less.
_WHOLE_TEXT = re.compile(r"\^(?!.*\(\?(?!:))(?:\((?:[^()\\]|\\.)*\)|[^|()^$\\]|\\[^bB1-9])*\$", re.DOTALL)


class SchemaLibrary(NamedTuple):
    keywords: frozenset[str]
    formats: frozenset[str]
    holds_beside: Callable[[str, Schema], bool]  # True if the library holds a keyword beside the others of its schema
    is_silent: bool  # it drops what it does not hold; otherwise it refuses that by name
    most_branches: int  # branches of one anyOf or oneOf
    most_optional: int  # properties of one object that may be left out and whose values may be any text
    most_groups: int  # different schemas of such properties, where there are more of them
    holds: Callable[[Any], bool] = lambda schema: True  # True if the library compiles a schema, which may take long


def _llguidance_holds(key: str, schema: Schema) -> bool:
    if key not in ("minProperties", "maxProperties"):
        return True
    named, required = schema.get("properties", {}), schema.get("required", [])
    return isinstance(named, dict) and isinstance(required, list) and all(name in required for name in named)


def _xgrammar_holds(key: str, schema: Schema) -> bool:
    if key in ("minLength", "maxLength", "format"):
        return "pattern" not in schema
    if key == "anyOf":
        return not schema.keys() & {"properties", "items", "prefixItems", "enum", "const"}
    if key == "patternProperties":
        return all(_WHOLE_TEXT.fullmatch(name) for name in schema[key])
    return key != "pattern" or _WHOLE_TEXT.fullmatch(schema[key]) is not None


LLGUIDANCE = SchemaLibrary(
    keywords=_SHARED | {"allOf"},
    formats=_FORMATS,
    holds_beside=_llguidance_holds,
    is_silent=False,
    most_branches=256,
    most_optional=40,
    most_groups=24,
)
XGRAMMAR = SchemaLibrary(
    keywords=_SHARED - {"oneOf"},
    formats=_FORMATS | {"uri-reference", "json-pointer"},
    holds_beside=_xgrammar_holds,
    is_silent=True,
    most_branches=256,
    most_optional=40,
    most_groups=24,
)
