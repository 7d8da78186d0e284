"""Turns an error of llguidance into one sentence for the client: the mistake, its place, and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from backend.api.guide import Guide, GuideType
from backend.guided.schema_parts import parts

LINE = re.compile(r"at (\d+)\(\d+\): ")  # where it stands in a grammar
_LONGEST = 300
_SHOWN = 80
_OBVIOUS = "failed to compile JSON schema: "  # repeats "it cannot be compiled"
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_NO_TEXT = {
    GuideType.EBNF_GRAMMAR: "the grammar derives no text; give its rules an alternative that ends",
    GuideType.REGEX: "the regex matches no text; correct it",
}
_NOTHING = "nothing satisfies it; correct it"
_Schema = dict[str, Any]
# ` at properties.a`, the first part that something is true of; '' where that is the whole schema, None where there is none.
_Find = Callable[[Callable[[_Schema], bool]], str | None]


def is_gbnf(guide: Guide) -> bool:
    """True if a grammar is read as GBNF; otherwise it is read as Lark."""
    return "::=" in guide.text


def sentence(error: str, guide: Guide | None = None, schema: Any = None) -> str:
    """`schema`: what the error is about, where it is known which."""
    found = LINE.match(error)
    line = found[0] if found else ""
    error = error.removeprefix(line).removeprefix(_OBVIOUS)

    def find(is_meant: Callable[[_Schema], bool]) -> str | None:
        place = next((part.place for part in parts(schema) if is_meant(part.schema)), None)
        return f" at {place[:_SHOWN]}" if place else place

    if error.startswith("NoExtensionBias"):
        return _NO_TEXT.get(guide.type, _NOTHING) if guide is not None else _NOTHING
    for pattern, sentence_of in _SENTENCES.items():
        if found := re.match(pattern, error, re.DOTALL):
            return f"{line}{sentence_of(found, find)}"[:_LONGEST]
    lines = error.split("\n")
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    text = " ".join(f"{line}{lines[0]} {reason}".split())[:_LONGEST] or "it is too complex; simplify it"
    if guide is not None and guide.type is GuideType.EBNF_GRAMMAR:
        text += "; it was read as " + ("GBNF, for it has ::=" if is_gbnf(guide) else "Lark, for it has no ::=")
    return text


def _regex(found: re.Match[str], find: _Find) -> str:
    """The sentence for a guide that is a regex."""
    try:
        regex = json.loads(f'"{found[1]}"', strict=False)
    except ValueError:
        regex = found[1]
    return f"the regex {regex[:_SHOWN]}: {found[2]}; correct it"


def _pattern(found: re.Match[str], find: _Find) -> str:
    """The sentence for a keyword pattern or patternProperties."""
    shown = found[1]

    def is_meant(schema: _Schema) -> bool:
        names = schema.get("patternProperties")
        return schema.get("pattern") == shown or (isinstance(names, dict) and shown in names)

    return f"the pattern {shown[:_SHOWN]}{find(is_meant) or ''}: {found[2]}; correct it"


def _keywords(found: re.Match[str], find: _Find) -> str:
    names = re.findall('"([^"]*)"', found[1])
    place = find(lambda schema: all(name in schema for name in names)) or ""
    return f"{found[0]}{place}; leave them out"


def _format(found: re.Match[str], find: _Find) -> str:
    place = find(lambda schema: schema.get("format") == found[1]) or ""
    return f"{found[0]}{place}; leave it out, or use pattern"


def _type(found: re.Match[str], find: _Find) -> str:
    def is_meant(schema: _Schema) -> bool:
        type = schema.get("type")
        return found[1] in (type if isinstance(type, list) else [type])

    return f"{found[0]}{find(is_meant) or ''}; give {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"


def _no_type(found: re.Match[str], find: _Find) -> str:
    place = find(lambda schema: not isinstance(schema.get("type", ""), str | list)) or ""
    return f"type{place} is no text and no list of texts; give {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"


def _expected(found: re.Match[str], find: _Find) -> str:
    kind, key, value = found[1], found[2], found[3]
    place = find(lambda schema: key in schema and json.dumps(schema[key]) == value) or ""
    needed = "number" if kind == "f64" else kind
    return f"{key}{place} is {value[:_SHOWN]}, {'an' if needed[0] in 'aeiou' else 'a'} {needed} is needed; correct it"


def _one_of(found: re.Match[str], find: _Find) -> str:
    place = find(lambda schema: "oneOf" in schema) or ""
    return f"oneOf{place} is held only where no value fits two of its branches; use anyOf"


def _empty(found: re.Match[str], find: _Find) -> str:
    """llguidance makes an enum an anyOf."""
    place = find(lambda schema: schema.get("enum") == [])
    key = "anyOf" if place is None else "enum"
    return f"{key}{place or ''} is empty, which nothing satisfies; give it at least one entry"


def _container(found: re.Match[str], find: _Find) -> str:
    key, kind = found[1], list if found[2] == "array" else dict
    place = find(lambda schema: key in schema and not isinstance(schema[key], kind)) or ""
    return f"{key}{place} must be an {found[2]}; correct it"


def _unsatisfiable(found: re.Match[str], find: _Find) -> str:
    return f"{found[1]}, so nothing satisfies the schema; correct it"


def _no_text(found: re.Match[str], find: _Find) -> str:
    return "pattern and format (or minLength, maxLength) together allow nothing; leave one of them out"


def _pointer(found: re.Match[str], find: _Find) -> str:
    shown = f"#{found[1]}"
    place = find(lambda schema: schema.get("$ref") == shown) or ""
    return f'$ref "{shown[:_SHOWN]}"{place} leads to nothing; put there what it names, or correct it'


def _resource(found: re.Match[str], find: _Find) -> str:
    shown = found[1].removeprefix("json-schema:///")
    place = find(lambda schema: str(schema.get("$ref")).startswith(shown)) or ""
    return f'$ref "{shown[:_SHOWN]}"{place}: $ref leads within a schema only; put what it names there'


# Pattern of an error -> the function that makes the sentence for the client.
_SENTENCES: dict[str, Callable[[re.Match[str], _Find], str]] = {
    r'invalid regex "(.*?)" \(in regex\): regex parse error:.*?\nerror: ([^\n]*)': _regex,
    r"regex parse error:\n    ([^\n]*)(?=\n).*?\nerror: ([^\n]*)": _pattern,
    r"Unimplemented keys: (\[[^\n]*\])": _keywords,
    r"Unknown format: ([^\n]*)": _format,
    r"Invalid type: ([^\n]*)": _type,
    "type must be a string": _no_type,
    r"Expected ([\w ]+) for '(\w+)', got ([^\n]*)": _expected,
    "oneOf constraints": _one_of,
    "Unsatisfiable schema: anyOf is empty": _empty,
    "Unsatisfiable schema: Regex is empty": _no_text,
    r"Unsatisfiable schema: ([^\n]*)": _unsatisfiable,
    r"(\w+) must be an (array|object)": _container,
    r"(?:Pointer|Anchor) '([^\n]*)' does not exist": _pointer,
    r"Resource '([^\n]*?)' is not present": _resource,
}
