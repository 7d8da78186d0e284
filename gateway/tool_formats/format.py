"""ToolFormat: how a family of models writes tool calls, for the reader of answers and for guides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.messages import Function
from gateway.parts import Call, new_call
from gateway.tool_formats.source import NotACall, Parsing, Source

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_LISTED = 150  # parameters of one function
_FURTHER = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "dependentSchemas",
    "patternProperties",
}  # keywords that may declare further parameters
Functions = Mapping[str, Function]  # by their names


class Group(NamedTuple):
    """The texts around and between calls that follow each other."""

    begin: str = ""
    separator: str = ""
    end: str = ""


class ToolFormat:
    """One format. A subclass sets these and writes `read` and `structure`."""

    openings: tuple[str, ...] = ()  # texts that begin calls, anywhere in the answer
    first: tuple[str, ...] = ()  # single characters that begin them where nothing but white space is ahead
    special: tuple[str, ...] = ()  # marks that are special tokens of some tokenizers, whose text must not be hidden
    trigger = ""  # in free text the guide holds what follows it; '': free text is not guided
    is_json = False  # calls are JSON objects, which models of this format also write without its marks (whole.py)
    start = ""  # the text between the reasoning and a call that must be made
    answer = ""  # the text ahead of an answer of a given form that is no call
    group = Group()

    def read(self, source: Source, functions: Functions) -> Parsing:
        """Read the calls that begin with one of the openings, at which the source stands; yields each one. Raises NotACall."""
        raise NotImplementedError

    def structure(self, function: Function) -> dict[str, Any]:
        """A structure of the guide for one call (docs/guided-decoding.md)."""
        raise NotImplementedError


def schema_of(function: Function) -> dict[str, Any]:
    """Without parameters a function takes an empty object."""
    return function.parameters or NO_PARAMETERS


def has_listed_parameters(function: Function) -> bool:
    """True if the schema lists all parameters, and few enough for a guide that takes each by itself."""
    schema = schema_of(function)
    properties = schema.get("properties")
    return isinstance(properties, dict) and len(properties) <= MAX_LISTED and not schema.keys() & _FURTHER


class Parameter(NamedTuple):
    name: str
    schema: Any
    is_required: bool


def parameters_of(function: Function) -> list[Parameter]:
    """The parameters by themselves, in the order of the schema; what their schemas refer to comes along."""
    schema = schema_of(function)
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    names = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        Parameter(name, {**shared, **each} if isinstance(each, dict) else each, name in names)
        for name, each in properties.items()
    ]


def call_of(name: Any, arguments: Any, call_id: str | None = None) -> Call:
    """A call. Raises NotACall for what is none: a model that was not guided may write anything."""
    if not isinstance(name, str) or not name:
        raise NotACall
    try:
        return new_call(name, arguments, call_id)
    except (ValueError, RecursionError):
        raise NotACall from None


def named_call(tree: Any, *keys: str) -> Call:
    """The call of an object {"name": ..., KEY: ...}, KEY being the first of the keys that is there. Raises NotACall."""
    if not isinstance(tree, dict):
        raise NotACall
    key = next((key for key in keys if key in tree), None)
    if key is None:
        raise NotACall
    return call_of(tree.get("name"), tree[key])
