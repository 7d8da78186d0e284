"""Reads the JSON of guides, and refuses by name what no engine here holds as JSON Schema means it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from backend.guided.protocol import GuideError


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
