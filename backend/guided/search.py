"""A schema that a library does not compile, though it holds each keyword: the nearest looser form, by its own verdict.

The smallest part that it does not compile loses keywords until it does.
"""

from __future__ import annotations

from typing import Any

from backend.guided.holdable import SchemaLibrary
from backend.guided.keywords import KEYWORDS, Inside, Schema
from backend.guided.loosening import DEPENDENTS, Note, any_of
from backend.guided.schema_parts import beyond

MAX_TRIALS = 300  # schemas that are compiled on the way; what is left then allows everything
MOST_BRANCHES = 32  # a longer list is kept or given up as a whole, for its members would use up the trials
_HOMES = ("$defs", "definitions")
# Keywords in the order in which they are given up.
_ORDER = ("pattern", "format", "oneOf", "patternProperties", "allOf", "anyOf", "required")


class Search:
    def __init__(self, library: SchemaLibrary, root: Schema, place: str) -> None:
        """`place`: where the schema stands in the guide."""
        self._library, self._root, self._place = library, root, place
        self._homes = {key: dict(root[key]) for key in _HOMES if isinstance(root.get(key), dict)}
        self._left = MAX_TRIALS
        self.notes: list[Note] = []

    def schema(self) -> Any:
        for key, home in self._homes.items():
            for name, each in home.items():
                home[name] = self._found(each, beyond(beyond(self._place, key), name))
        found = self._found({key: value for key, value in self._root.items() if key not in _HOMES}, self._place)
        return {**found, **self._homes} if isinstance(found, dict) else found

    def _holds(self, part: Any) -> bool:
        self._left -= 1
        return self._left > 0 and self._library.holds({**part, **self._homes})

    def _found(self, part: Any, place: str) -> Any:
        if not isinstance(part, dict) or self._holds(part) or part.keys() == {"$ref"}:
            return part
        own = {key: self._inside(key, value, beyond(place, key)) for key, value in part.items()}
        if self._holds(own):
            return own
        if "oneOf" in own:
            self.notes.append(Note(place, "oneOf"))
            any_of(own)
            if self._holds(own):
                return own
        return self._without_keywords(own, place)

    def _inside(self, key: str, value: Any, place: str) -> Any:
        inside = KEYWORDS[key].inside if key in KEYWORDS else Inside.NOTHING
        if inside is Inside.NAMED and isinstance(value, dict):
            return {name: self._found(each, beyond(place, name)) for name, each in value.items()}
        if inside in (Inside.LIST, Inside.EITHER) and isinstance(value, list):
            if len(value) > MOST_BRANCHES:
                return value
            return [self._found(each, f"{place}[{i}]") for i, each in enumerate(value)]
        return self._found(value, place) if inside in (Inside.SCHEMA, Inside.EITHER) else value

    def _without_keywords(self, own: Schema, place: str) -> Schema:
        keys = sorted(own.keys() & KEYWORDS.keys(), key=lambda key: (key not in _ORDER, key))
        for key in keys:  # one alone, then one after the other
            fewer = _without(own, key)
            if self._holds(fewer):
                self.notes.append(Note(place, key))
                return fewer
        for key in keys:
            own = _without(own, key)
            self.notes.append(Note(place, key))
            if self._holds(own):
                return own
        return {}


def _without(own: Schema, key: str) -> Schema:
    gone = {key, *DEPENDENTS.get(key, ())}
    return {other: value for other, value in own.items() if other not in gone}
