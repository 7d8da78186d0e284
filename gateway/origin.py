"""The field of a client's request that its guide was made from, so that an error of the model about the guide names it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STRUCTURE = re.compile(r"\.structures\[(\d+)\]")
OF_SCHEMAS, OF_FUNCTIONS = "invalid_json_schema", "invalid_function_parameters"  # OpenAI's codes


@dataclass(frozen=True)
class GuideOrigin:
    """`field`: as in `structured_outputs.regex`. `structures`: the fields that the structures of a tag were made of, where the
    gateway has made the tag itself. `code`: of the error when the model refuses the guide.
    """

    field: str
    code: str = "invalid_value"
    structures: tuple[str, ...] = ()

    def field_at(self, place: str) -> str:
        """The field for a place in the guide, as in `.structures[1].schema`; '' is the whole guide."""
        if not self.structures:
            return self.field + place
        found = _STRUCTURE.match(place)
        return self.field if found is None else self.structures[int(found[1])]

    def named(self, note: str) -> str:
        """A note of the model about a place in the guide, as in `.structures[1].schema.properties.a: pattern`, of the field."""
        place, _, keyword = note.rpartition(": ")
        _, schema, inner = place.partition(".schema")
        return f"{self.field_at(place)}{inner if schema else ''}: {keyword}"


@dataclass(frozen=True)
class Form:
    """The form of an answer: the `guide` of the Triton model's request, and the field that it came from."""

    guide: dict[str, str]
    origin: GuideOrigin
