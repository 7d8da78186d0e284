"""[TOOL_CALLS] before a list of {"name": NAME, "arguments": {...}}, or, since tokenizer version 11, before each call as
NAME[ARGS]{...}, with [CALL_ID]ID behind the name in some: Mistral, Ministral, Magistral, Devstral.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, Group, ToolFormat, call_of, named_call, schema_of
from gateway.tool_formats.source import Parsing, Source

OPENING, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ToolFormat):
    is_json = True
    openings = (OPENING,)
    special = (OPENING, ARGUMENTS, ID)
    trigger = OPENING
    group = Group(OPENING + "[", ", ", "]")

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.expect(OPENING)
        yield from source.space()
        if not (yield from source.takes("[")):
            yield from self._named(source)
            return
        while True:
            tree = yield from source.json()
            yield named_call(tree, "arguments")
            yield from source.space()
            if not (yield from source.takes(",")):
                break
        yield from source.takes("]")

    def _named(self, source: Source) -> Parsing:
        name = yield from source.name()
        while mark := (yield from source.takes(ARGUMENTS, ID)):
            if mark == ID:
                yield from source.name()
        yield call_of(name, (yield from source.json()))

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f'{{"name": {json.dumps(function.name)}, "arguments": '
        return {"begin": begin, "schema": schema_of(function), "end": "}"}


class MistralNamed(Mistral):
    """The later form; both are read."""

    group = Group()

    def structure(self, function: Function) -> dict[str, Any]:
        return {"begin": f"{OPENING}{function.name}{ARGUMENTS}", "schema": schema_of(function), "end": ""}
