"""From a schema to one that a library holds: what says nothing is dropped, what it cannot hold becomes the nearest looser form.

Everything that the schema allows stays possible, whatever is dropped. Two keywords make that hard: `oneOf` forbids more where its
branches allow more, so it becomes anyOf then; and what `properties`, `patternProperties` and `prefixItems` name falls to
`additionalProperties` and `items` without them, so these go with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

from backend.guided.holdable import SchemaLibrary
from backend.guided.keywords import IN_PLACE, KEYWORDS, TYPES, Inside, Schema
from backend.guided.protocol import GuideError
from backend.guided.references import References, with_part
from backend.guided.regexes import of_names, without_lookaround
from backend.guided.schema_parts import beyond

# A keyword -> those that would forbid more without it.
DEPENDENTS = {
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    "items": ("unevaluatedItems",),
}
_SHORT_TYPES = ("boolean", "integer", "number", "null")


class Note(NamedTuple):
    """A keyword that is not held. `place`: of its schema."""

    place: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.place}: {self.keyword}"


class Loosening:
    """Loosens one schema. `notes`: the keywords that are not held."""

    def __init__(self, library: SchemaLibrary, root: Schema, is_strict: bool, place: str = "") -> None:
        """is_strict: nothing is loosened; what cannot be held is left to the library, or refused where that is silent.
        place: where the schema stands in the guide.
        """
        self._library, self._root, self._is_strict, self._place = library, root, is_strict, place
        self._references = References(root)
        self.notes: list[Note] = []

    def schema(self) -> Any:
        """Raises GuideError."""
        found = self._held(self._root, self._place)
        for keys, target in self._references.elsewhere():
            found = with_part(found, keys, self._held(target, reduce(beyond, keys, self._place)))
        return found

    def _held(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._give_up(place, "schema")
            return schema if self._is_strict else True
        own = dict(schema)
        if self._references.are_alone and "$ref" in own:
            own = {
                key: value
                for key, value in own.items()
                if key not in KEYWORDS or key in ("$ref", "$defs", "definitions")
            }
        for rewrite in _REWRITES:
            rewrite(own)
        for key in list(own):
            if key in own and key in KEYWORDS:
                self._keyword(own, key, place)
        return self._narrowed(own, place)

    def _keyword(self, own: Schema, key: str, place: str) -> None:
        row, value = KEYWORDS[key], own[key]
        if not row.fits(value):
            self._drop(own, key, place)
        elif row.is_idle(value, own) and not self._references.lead_through(key):
            del own[key]
        elif key == "pattern" and not self._is_strict:
            self._pattern(own, place)
        elif not self._is_held(key, value, own, place):
            self._drop(own, key, place)
        else:
            notes = len(self.notes)
            own[key] = self._inside(row.inside, own, key, beyond(place, key))
            if key == "oneOf" and len(self.notes) > notes:
                any_of(own)

    def _is_held(self, key: str, value: Any, own: Schema, place: str) -> bool:
        library = self._library
        match key:
            case "$ref":
                return self._references.leads_somewhere(value)
            case "format":
                return value in library.formats and library.holds_beside(key, own)
            case "anyOf" | "oneOf" if _num_branches(value) > library.most_branches:
                self._check_limit("branches", _num_branches(value), library.most_branches, beyond(place, key))
                return False
        return key in library.keywords and library.holds_beside(key, own)

    def _inside(self, inside: Inside, own: Schema, key: str, place: str) -> Any:
        value = own[key]
        if inside is Inside.SCHEMA or (inside is Inside.EITHER and not isinstance(value, list)):
            return self._held(value, place)
        if inside in (Inside.LIST, Inside.EITHER):
            return [self._held(each, f"{place}[{i}]") for i, each in enumerate(value)]
        if inside is not Inside.NAMED:
            return value
        found = {name: self._held(each, beyond(place, name)) for name, each in value.items()}
        if key == "patternProperties" and not self._is_strict:
            for name in [name for name in found if not self._holds_pattern(name)]:
                del found[name]
                self._give_up(place, "patternProperties")
                _forget(own, *DEPENDENTS[key])
        return found

    def _pattern(self, own: Schema, place: str) -> None:
        if self._holds_pattern(own["pattern"]):
            return
        looser = without_lookaround(own["pattern"])
        self._drop(own, "pattern", place)
        if looser and self._holds_pattern(looser):
            own["pattern"] = looser

    def _holds_pattern(self, pattern: str) -> bool:
        of_texts = {"type": "string", "pattern": pattern}
        return self._library.holds_beside("pattern", of_texts) and self._library.holds(of_texts)

    def _drop(self, own: Schema, key: str, place: str) -> None:
        """Drop a keyword that is not held, with those that would forbid more without it. In its place may come a weaker one."""
        self._give_up(place, key)
        if self._is_strict:
            return
        value = own.pop(key)
        _forget(own, *DEPENDENTS.get(key, ()))
        if key == "oneOf" and KEYWORDS[key].fits(value) and _num_branches(value) <= self._library.most_branches:
            own["oneOf"] = [self._held(each, f"{beyond(place, key)}[{i}]") for i, each in enumerate(value)]
            any_of(own)
        least, given = own.get("minContains", 1), own.get("minItems", 0)
        if key == "contains" and KEYWORDS["minItems"].fits(least) and KEYWORDS["minItems"].fits(given):
            own["minItems"] = max(least, given)

    def _give_up(self, place: str, key: str) -> None:
        if not self._is_strict:
            self.notes.append(Note(place, key))
        elif self._library.is_silent:
            at = self._shown(place)
            raise GuideError(f"it cannot be held in full: {key}{at and f' at {at}'}; leave it out", self._place)

    def _check_limit(self, what: str, count: int, limit: int, place: str) -> None:
        """An output under the guide would break off for more: strictly, refuse them."""
        if self._is_strict:
            text = (
                f"it cannot be held in full: {self._shown(place)} has {count} {what}, the limit is {limit}; give fewer"
            )
            raise GuideError(text, self._place)

    def _shown(self, place: str) -> str:
        return place[len(self._place) :].lstrip(".")[:80]

    def _narrowed(self, own: Schema, place: str) -> Schema:
        """Narrow the choice where optional properties are few. Of many, each could come next, and a library that has them in
        their order would try them all at each token. So they come in any order, by patterns of their names.
        """
        library, named, required = self._library, own.get("properties"), own.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list):
            return own
        free = {name: each for name, each in named.items() if name not in required and not _is_short(each)}
        if len(free) <= library.most_optional or self._references.lead_through("properties"):
            return own
        groups: dict[str, list[str]] = {}
        for name, each in free.items():
            groups.setdefault(json.dumps(each, sort_keys=True), []).append(name)
        what = "different schemas of properties that may be left out"
        if len(groups) > library.most_groups:
            self._check_limit(what, len(groups), library.most_groups, beyond(place, "properties"))
            self._give_up(place, "properties")
            groups = {json.dumps(_types_of(list(free.values()))): list(free)}
        patterns = {of_names(names): json.loads(each) for each, names in groups.items()}
        kept = {name: each for name, each in named.items() if name not in free}
        return {**own, "properties": kept, "patternProperties": {**own.get("patternProperties", {}), **patterns}}


def _num_branches(branches: list[Any]) -> int:
    """The number of branches that are more than a value."""
    return sum(not (isinstance(each, dict) and each.keys() & {"const", "enum"}) for each in branches)


def any_of(own: Schema) -> None:
    """Make a oneOf an anyOf."""
    branches = own.pop("oneOf")
    if "anyOf" in own:
        own["allOf"] = [*own.get("allOf", []), {"anyOf": branches}]
    else:
        own["anyOf"] = branches


def _forget(own: Schema, *keys: str) -> None:
    for key in keys:
        own.pop(key, None)


def _is_short(schema: Any) -> bool:
    """True if its values are no free texts, arrays or objects."""
    if not isinstance(schema, dict):
        return schema is False
    types = schema.get("type", "any")
    listed = types if isinstance(types, list) else [types]
    return "enum" in schema or "const" in schema or all(each in _SHORT_TYPES for each in listed)


def _types_of(schemas: list[Any]) -> Schema:
    """A schema that allows what any of these do, by their types."""
    types = [each.get("type") if isinstance(each, dict) else None for each in schemas]
    listed = {name for each in types for name in (each if isinstance(each, list) else [each])}
    return {"type": [name for name in TYPES if name in listed]} if None not in listed else {}


def _exclusive(own: Schema) -> None:
    """Draft 4 says that a bound is exclusive by true beside it."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(own.get(key), bool):
            is_so = own.pop(key)
            if is_so and bound in own:
                own[key] = own.pop(bound)


def _tuples(own: Schema) -> None:
    """Drafts before 2020-12 have the list as `items`."""
    if isinstance(own.get("items"), list) and "prefixItems" not in own and own["items"]:
        own["prefixItems"] = own.pop("items")
        if "additionalItems" in own:
            own["items"] = own.pop("additionalItems")


def _unevaluated(own: Schema) -> None:
    """Beside plain keywords the rest is what none of them names."""
    if any(key in own for key in IN_PLACE):
        return
    if "unevaluatedProperties" in own:
        rest = own.pop("unevaluatedProperties")
        own.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in own and "contains" not in own:
        rest = own.pop("unevaluatedItems")
        own.setdefault("items", rest)


def _names(own: Schema) -> None:
    """Names from a list, or of a pattern, are properties."""
    names = own.get("propertyNames")
    if not isinstance(names, dict) or any(key in own for key in ("properties", "patternProperties", *IN_PLACE)):
        return
    told = {key for key in names if key in KEYWORDS and not KEYWORDS[key].is_idle(names[key], names)} - {"type"}
    values = own.get("additionalProperties", True)
    if told == {"enum"} and all(isinstance(name, str) for name in names["enum"]):
        own |= {"properties": dict.fromkeys(names["enum"], values), "additionalProperties": False}
    elif told == {"pattern"} and isinstance(names["pattern"], str):
        own |= {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    else:
        return
    del own["propertyNames"]


def _counts(own: Schema) -> None:
    """JSON Schema takes 2.0 for 2."""
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        value = own.get(key)
        if isinstance(value, float) and value.is_integer():
            own[key] = int(value)


_REWRITES: tuple[Callable[[Schema], None], ...] = (_exclusive, _tuples, _unevaluated, _names, _counts)
