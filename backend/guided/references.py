"""References: where the $refs of a schema lead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from backend.guided.keywords import KEYWORDS, Schema, is_schema
from backend.guided.schema_parts import parts

_OLD = re.compile(r"draft-0[3467]\b")  # a $ref hides its siblings there


class References:
    def __init__(self, root: Schema) -> None:
        self._root = root
        found = [part.schema for part in parts(root)]
        self._refs = {str(each["$ref"]) for each in found if isinstance(each.get("$ref"), str)}
        self._anchors = {str(each.get("$anchor")) for each in found}
        self._has_ids = any(isinstance(each.get("$id"), str) for each in found)
        self.are_alone = isinstance(draft := root.get("$schema"), str) and _OLD.search(draft) is not None

    def lead_through(self, key: str) -> bool:
        """True if one leads to what lies in a keyword, which must then stay where it is."""
        return any(f"/{key}/" in f"{ref}/" for ref in self._refs)

    def leads_somewhere(self, ref: str) -> bool:
        """True if it leads to a schema within this one."""
        if not ref.startswith("#"):
            return self._has_ids  # then the library says
        seen = {ref}
        target = self.target(ref)
        while isinstance(target, dict) and isinstance(further := target.get("$ref"), str):
            if further in seen:
                return False  # it asks for itself
            seen.add(further)
            target = self.target(further) if further.startswith("#") else True
        return is_schema(target) or ref[1:] in self._anchors

    def elsewhere(self) -> Iterator[tuple[list[str], Any]]:
        """The schemas that they lead to in keys that JSON Schema does not know, with the keys on the way there."""
        for ref in sorted(self._refs):
            keys = _keys(ref)
            if keys and keys[0] not in KEYWORDS and isinstance(target := self.target(ref), dict):
                yield keys, target

    def target(self, ref: str) -> Any:
        """The schema at the place that a reference names; None or another value if there is none."""
        found: Any = self._root
        for key in _keys(ref):
            if isinstance(found, dict):
                found = found.get(key, None)
            elif isinstance(found, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            else:
                return None
        return found if ref in ("#", "") or ref.startswith("#/") else None


def _keys(ref: str) -> list[str]:
    """The keys of a JSON pointer in a fragment; none for the root and for names."""
    if not ref.startswith("#/"):
        return []
    return [unquote(key).replace("~1", "/").replace("~0", "~") for key in ref[2:].split("/")]


def with_part(root: Any, keys: list[str], part: Any) -> Any:
    """The schema `root` with `part` in the place that `keys` lead to. Each key exists."""
    if not keys:
        return part
    own: Any = dict(root) if isinstance(root, dict) else list(root)
    key: Any = keys[0] if isinstance(root, dict) else int(keys[0])
    own[key] = with_part(own[key], keys[1:], part)
    return own
