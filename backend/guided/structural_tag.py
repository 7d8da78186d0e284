"""StructuralTag: free text in which certain beginnings must be followed by JSON of a schema and an ending.

{"type": "structural_tag", "triggers": ["<function="],
 "structures": [{"begin": "<function=add>", "schema": {...}, "end": "</function>"}]}

Six keys are this project's own. With `"free_text": false` the output is one of the structures and nothing else (triggers are
then left out), with `"at_most_one": true` it ends with the first structure. `"group"` has `begin`, `separator` and `end`, texts
that stand around structures which follow each other. `"parts"` of a structure is in the place of `"schema"` where there is more
between begin and end than one value: a TEXT, {"schema": SCHEMA}, {"until": TEXT}, which is any text up to and with the first
TEXT, or {"optional": [the parts that may be left out]}. With `"hold": "most"` the schemas of a structure are held as far as
they can be, with `"object"` not at all, and with `"closed": true` objects that declare properties have no others, unless they
say so (guided/held.py).

Where the texts name special tokens of the model, these tokens are meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from backend.guided.keywords import parse_json
from backend.guided.protocol import GuideError

_FORM = '{"type": "structural_tag", "structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}'
_PARTS = 'TEXT, {"schema": SCHEMA}, {"until": TEXT} or {"optional": [PARTS]}'
_KEYS = {"type", "structures", "triggers", "free_text", "at_most_one", "group"}
HOLD, MOST, OBJECT = "hold", "most", "object"
MAX_STRUCTURES = 128
MAX_PARTS = 512  # in one structure, with those that are optional


class Json(NamedTuple):
    schema: Any
    place: str  # in the guide's text, as in `.structures[1].schema`


class Until(NamedTuple):
    text: str


class Maybe(NamedTuple):
    parts: list[Part]


Part = str | Json | Until | Maybe


class Structure(NamedTuple):
    begin: str
    parts: list[Part]
    end: str


class TagGroup(NamedTuple):
    begin: str
    separator: str
    end: str


class StructuralTag(NamedTuple):
    structures: list[Structure]
    triggers: list[str]  # none: the output is one of the structures
    at_most_one: bool = False
    group: TagGroup | None = None

    def of_trigger(self, trigger: str) -> list[int]:
        """The structures that may follow it, by their places."""
        if self.group is not None:
            return list(range(len(self.structures))) if self.group.begin.startswith(trigger) else []
        return [i for i, structure in enumerate(self.structures) if structure.begin.startswith(trigger)]

    def texts(self) -> Iterator[str]:
        """All texts that the output may have to hold."""
        yield from (*self.triggers, *(self.group or ()))
        for structure in self.structures:
            yield from (structure.begin, structure.end)
            for part in each_part(structure.parts):
                if not isinstance(part, Json):
                    yield part.text if isinstance(part, Until) else part


def parse_structural_tag(text: str) -> StructuralTag:
    """Raises GuideError for another form, and for triggers and beginnings that do not fit each other."""
    tree = parse_json(text)
    if not isinstance(tree, dict) or tree.get("type", "structural_tag") != "structural_tag":
        raise GuideError(f"the structural tag has not the form {_FORM}")
    unknown = set(tree) - _KEYS
    if unknown:
        raise GuideError(f"the structural tag has the key {min(unknown)[:80]!r}; its form is {_FORM}")
    structures, triggers, is_bound = tree.get("structures"), tree.get("triggers", []), tree.get("free_text") is False
    if not (isinstance(structures, list) and isinstance(triggers, list) and structures and bool(triggers) != is_bound):
        raise GuideError(f"the structural tag needs structures and triggers; its form is {_FORM}")
    if len(structures) > MAX_STRUCTURES or len(triggers) > MAX_STRUCTURES:
        raise GuideError(f"the structural tag has more than {MAX_STRUCTURES} structures or triggers; give fewer")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GuideError("a trigger of the structural tag is no text, or empty; give texts")
    at_most_one = tree.get("at_most_one", False)
    if not isinstance(at_most_one, bool):
        raise GuideError("at_most_one of the structural tag is no bool; send true or false")
    found = [_structure(each, f".structures[{i}]") for i, each in enumerate(structures)]
    tag = StructuralTag(found, list(dict.fromkeys(triggers)), at_most_one, _group(tree.get("group")))
    _check_triggers(tag)
    return tag


def _check_triggers(tag: StructuralTag) -> None:
    for trigger in tag.triggers:
        if not tag.of_trigger(trigger):
            raise GuideError(f"no structure begins with the trigger {trigger[:80]!r}; remove it")
        if any(other != trigger and other.startswith(trigger) for other in tag.triggers):
            raise GuideError(f"the trigger {trigger[:80]!r} is the beginning of another one; leave one out")
    for structure in tag.structures if tag.triggers and tag.group is None else ():
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise GuideError(f"the structure {structure.begin[:80]!r} begins with no trigger; add one")


def _group(tree: Any) -> TagGroup | None:
    if tree is None:
        return None
    is_right = isinstance(tree, dict) and set(tree) <= set(TagGroup._fields)
    if not is_right or not all(isinstance(text, str) for text in tree.values()):
        raise GuideError("the group of the structural tag has begin, separator and end, which are texts")
    return TagGroup(*(tree.get(name, "") for name in TagGroup._fields))


def _structure(tree: Any, place: str) -> Structure:
    keys = {"begin", "end", HOLD, "closed", "parts" if isinstance(tree, dict) and "parts" in tree else "schema"}
    is_right = isinstance(tree, dict) and set(tree) <= keys and isinstance(tree.get("begin"), str)
    if not is_right or not isinstance(tree.get("end", ""), str) or not tree.keys() & {"schema", "parts"}:
        raise GuideError(f"a structure of the structural tag has not its form: {_FORM}")
    if tree.get(HOLD, MOST) not in (MOST, OBJECT) or not isinstance(tree.get("closed", False), bool):
        raise GuideError(
            f"a structure has `{HOLD}`, which is {MOST} or {OBJECT}, and `closed`, which is true or false", place
        )
    if "schema" in tree:
        parts: list[Part] = [Json(tree["schema"], f"{place}.schema")]
    else:
        parts = _parts(tree["parts"], f"{place}.parts", may_be_optional=True)
        if sum(1 for _ in each_part(parts)) > MAX_PARTS:
            raise GuideError(f"a structure has more than {MAX_PARTS} parts; give fewer", f"{place}.parts")
    return Structure(tree["begin"], parts, tree.get("end", ""))


def _parts(trees: Any, place: str, may_be_optional: bool) -> list[Part]:
    if not isinstance(trees, list):
        raise GuideError("parts are a list", place)
    return [_part(tree, f"{place}[{i}]", may_be_optional) for i, tree in enumerate(trees)]


def _part(tree: Any, place: str, may_be_optional: bool) -> Part:
    match tree:
        case str():
            return tree
        case {"schema": schema, **others} if not others:
            return Json(schema, f"{place}.schema")
        case {"until": str() as text, **others} if text and not others:
            return Until(text)
        case {"optional": parts, **others} if may_be_optional and not others:
            return Maybe(_parts(parts, f"{place}.optional", may_be_optional=False))
    raise GuideError(f"a part of a structure is none of {_PARTS}", place)


def each_part(parts: list[Part]) -> Iterator[str | Json | Until]:
    """All parts but those that hold others."""
    for part in parts:
        if isinstance(part, Maybe):
            yield from each_part(part.parts)
        else:
            yield part
