"""StructuralTag: free text in which certain beginnings must be followed by JSON of a schema and an ending.

{"type": "structural_tag", "triggers": ["<function="],
 "structures": [{"begin": "<function=add>", "schema": {...}, "end": "</function>"}]}

Two keys are this project's own: with `"free_text": false` the output is one of the structures and nothing else (triggers are then
left out), with `"at_most_one": true` it ends with the first structure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from backend.guided.json_text import parse_json
from backend.guided.protocol import GuideError

_FORM = '{"type": "structural_tag", "structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}'
MAX_STRUCTURES = 128


class Structure(NamedTuple):
    begin: str
    schema: Any
    end: str


class StructuralTag(NamedTuple):
    structures: list[Structure]
    triggers: list[str]  # none: the output is one of the structures
    at_most_one: bool = False

    def of_trigger(self, trigger: str) -> list[Structure]:
        return [structure for structure in self.structures if structure.begin.startswith(trigger)]


def parse_structural_tag(text: str) -> StructuralTag:
    """Raises GuideError for another form, and for triggers and beginnings that do not fit each other."""
    tree = parse_json(text)
    if not isinstance(tree, dict) or tree.get("type", "structural_tag") != "structural_tag":
        raise GuideError(f"the structural tag has not the form {_FORM}")
    unknown = set(tree) - {"type", "structures", "triggers", "free_text", "at_most_one"}
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
    tag = StructuralTag([_structure(each) for each in structures], list(dict.fromkeys(triggers)), at_most_one)
    for trigger in tag.triggers:
        if not tag.of_trigger(trigger):
            raise GuideError(f"no structure begins with the trigger {trigger[:80]!r}; remove it")
        if any(other != trigger and other.startswith(trigger) for other in tag.triggers):
            raise GuideError(f"the trigger {trigger[:80]!r} is the beginning of another one; leave one out")
    for structure in tag.structures if tag.triggers else ():
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise GuideError(f"the structure {structure.begin[:80]!r} begins with no trigger; add one")
    return tag


def _structure(tree: Any) -> Structure:
    is_right = isinstance(tree, dict) and set(tree) <= {"begin", "schema", "end"} and isinstance(tree.get("begin"), str)
    if not is_right or not isinstance(tree.get("end", ""), str) or "schema" not in tree:
        raise GuideError(f"a structure of the structural tag has not its form: {_FORM}")
    return Structure(tree["begin"], tree["schema"], tree.get("end", ""))
