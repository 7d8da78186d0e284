"""Objects of declared keys only: what a forced call's arguments are, where their schema does not say otherwise.

JSON Schema lets an object have any further keys. A model that has to call a tool would invent some, or write one twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backend.guided.keywords import IN_PLACE, Schema
from backend.guided.references import References

_SAYS_OTHERWISE = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
)
_WHOLE = ("anyOf", "oneOf")  # alone, each branch says by itself what the value is
_UNKNOWN: Schema = {"additionalProperties": True}  # stands for a schema that a reference does not lead to
_HOME = "closedObjects"  # a key that JSON Schema does not know, for copies of what a $ref leads to


def closed(root: Any) -> Any:
    """The schema with the objects closed that declare properties and say nothing of further ones."""
    if not isinstance(root, dict):
        return root
    closing = _Closing(root)
    found = closing.of(root)
    return {**found, _HOME: closing.copies} if closing.copies else found


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._references = References(root)
        self._numbers: dict[str, str] = {}  # numbers of the closed copies, by the $refs to their originals
        self.copies: dict[str, Any] = {}

    def of(self, schema: Any) -> Any:
        """`schema`: one that says by itself what its value is."""
        if not isinstance(schema, dict):
            return schema
        applied = [key for key in IN_PLACE if key in schema]
        if len(applied) == 1 and not isinstance(schema.get("properties"), dict):
            (key,) = applied
            if key in _WHOLE and isinstance(schema[key], list):
                return {**schema, key: [self.of(each) for each in schema[key]]}
            if key == "$ref":
                return {**schema, key: self._copy(schema[key])}
        own = dict(schema) if applied else {key: self._inside(key, value) for key, value in schema.items()}
        names = self._declared(schema)
        if names is None:
            return own
        declared = own["properties"] if isinstance(own.get("properties"), dict) else {}
        return {**own, "properties": {**dict.fromkeys(names, True), **declared}, "additionalProperties": False}

    def _inside(self, key: str, value: Any) -> Any:
        """The value of a keyword, with the schemas in it closed."""
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        if key in ("items", "prefixItems") and isinstance(value, list):
            return [self.of(each) for each in value]
        return self.of(value) if key in ("items", "additionalItems", "additionalProperties") else value

    def _copy(self, ref: Any) -> Any:
        """A $ref to a closed copy of what this one leads to."""
        target = self._references.target(ref) if isinstance(ref, str) else None
        if not isinstance(target, dict):
            return ref
        number = self._numbers.get(ref)
        if number is None:
            number = self._numbers[ref] = str(len(self._numbers))
            self.copies[number] = self.of(
                {key: value for key, value in target.items() if key not in ("$defs", "definitions")}
            )
        return f"#/{_HOME}/{number}"

    def _declared(self, schema: Schema) -> list[str] | None:
        """The names that an object of this schema may have; None where no properties are declared, or others are spoken of."""
        applied = list(self._applied(schema, set()))
        named = [each["properties"] for each in applied if isinstance(each.get("properties"), dict)]
        if not named or any(_SAYS_OTHERWISE & each.keys() for each in applied):
            return None
        required = [each["required"] for each in applied if isinstance(each.get("required"), list)]
        return list(dict.fromkeys(name for names in (*named, *required) for name in names if isinstance(name, str)))

    def _applied(self, schema: Any, seen: set[str]) -> Iterator[Schema]:
        """A schema, and those that are applied to the same value."""
        if not isinstance(schema, dict):
            return
        yield schema
        for key in IN_PLACE:
            value = schema.get(key)
            if isinstance(value, str):
                target = self._references.target(value) if key == "$ref" else None
                if value not in seen:
                    seen.add(value)
                    yield from self._applied(target if isinstance(target, dict) else _UNKNOWN, seen)
            elif isinstance(value, list | dict):
                each_of = value if isinstance(value, list) else value.values() if key == "dependentSchemas" else [value]
                for each in each_of:
                    yield from self._applied(each, seen)
