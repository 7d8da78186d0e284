"""How far a guide's schemas are held: in full, or, by `"hold": "most"` of a structure of a tag, as far as a library can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from backend.api.guide import Guide, GuideType
from backend.guided.closing import closed
from backend.guided.holdable import SchemaLibrary
from backend.guided.keywords import Schema, check_schema, parse_json
from backend.guided.loosening import Loosening, Note
from backend.guided.protocol import GuideError
from backend.guided.search import Search
from backend.guided.structural_tag import HOLD, MOST, OBJECT, parse_structural_tag

ANY_OBJECT: Schema = {"type": "object"}
_Compiled = TypeVar("_Compiled")


class Held(NamedTuple):
    """A guide all of whose schemas are to be held in full, and what was left out of them."""

    guide: Guide
    notes: list[Note]


def compile_held(guide: Guide, library: SchemaLibrary, make: Callable[[Held], _Compiled]) -> _Compiled:
    """Call `make` with looser and looser forms of a guide until one is not refused. Raises the GuideError of the last one."""
    refusal = GuideError("it cannot be compiled")
    for held in _forms(guide, library):
        try:
            return make(held)
        except GuideError as error:
            refusal = error
    raise refusal


def loosest(guide: Guide) -> Guide | None:
    """The guide with any JSON object where a schema need not be held; None where all must be, and of the loosest itself."""
    if guide.type is not GuideType.STRUCTURAL_TAG or f'"{MOST}"' not in guide.text:
        return None
    tree = json.loads(guide.text)
    loose = [each for each in tree["structures"] if each.get(HOLD) == MOST]
    for structure in loose:
        structure[HOLD] = OBJECT
    return Guide(guide.type, json.dumps(tree)) if loose else None


def _forms(guide: Guide, library: SchemaLibrary) -> Iterator[Held]:
    """The forms of a guide, each looser than the one before. Raises GuideError."""
    match guide.type:
        case GuideType.JSON_SCHEMA:
            schema = parse_json(guide.text)
            check_schema(schema)
            strict = Loosening(library, schema, is_strict=True).schema() if isinstance(schema, dict) else schema
            yield Held(Guide(guide.type, json.dumps(strict)), [])
        case GuideType.STRUCTURAL_TAG:
            parse_structural_tag(guide.text)
            for form in (_loosened, _searched) if f'"{MOST}"' in guide.text else (_loosened,):
                yield _of_tag(guide, library, form)
            if (last := loosest(guide)) is not None:
                yield _of_tag(last, library, _loosened)
        case _:
            yield Held(guide, [])


Form = Callable[[SchemaLibrary, Any, str, bool], tuple[Any, list[Note]]]


def _of_tag(guide: Guide, library: SchemaLibrary, form: Form) -> Held:
    tree, notes = parse_json(guide.text), list[Note]()
    for i, structure in enumerate(tree["structures"]):
        hold = structure.pop(HOLD, None)
        is_closed, place = structure.pop("closed", False), f".structures[{i}]"
        for holder, inner in _schemas(structure, place):
            given = closed(holder["schema"]) if is_closed else holder["schema"]
            widest: Schema = ANY_OBJECT if inner == f"{place}.schema" else {}
            if hold == MOST:
                given = _within(widest, given)
            if hold == OBJECT or (hold == MOST and not isinstance(given, dict)):
                notes.append(Note(inner, "schema"))
                holder["schema"] = widest
            elif isinstance(given, dict):
                found, more = form(library, given, inner, hold != MOST)
                notes += more
                holder["schema"] = _within(widest, found) if hold == MOST else found
    return Held(Guide(guide.type, json.dumps(tree)), notes)


def _schemas(tree: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects that have a schema, of a structure or of its parts, with the places of those."""
    if not isinstance(tree, dict):
        return
    if "schema" in tree:
        yield tree, f"{place}.schema"
    for key in ("parts", "optional"):
        for i, part in enumerate(tree.get(key, ())):
            yield from _schemas(part, f"{place}.{key}[{i}]")


def _within(widest: Schema, schema: Any) -> Any:
    """The schema of values that are objects whatever it says, if `widest` says so: arguments are."""
    if schema is True or schema == {}:
        return widest
    return {**schema, **widest} if isinstance(schema, dict) and "type" not in schema else schema


def _loosened(library: SchemaLibrary, schema: Any, place: str, is_strict: bool) -> tuple[Any, list[Note]]:
    loosening = Loosening(library, schema, is_strict, place)
    return loosening.schema(), loosening.notes


def _searched(library: SchemaLibrary, schema: Any, place: str, is_strict: bool) -> tuple[Any, list[Note]]:
    found, notes = _loosened(library, schema, place, is_strict)
    if is_strict or library.holds(found):
        return found, notes
    search = Search(library, found, place)
    looser = search.schema()
    return (looser, notes + search.notes) if library.holds(looser) else (True, [*notes, Note(place, "schema")])
