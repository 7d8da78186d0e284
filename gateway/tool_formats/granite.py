"""<|tool_call|> before a list of {"name": NAME, "arguments": {...}}: Granite 3. (Granite 4 writes as Hermes does.)"""

from __future__ import annotations

import json
from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, Group, ToolFormat, named_call, schema_of
from gateway.tool_formats.source import Parsing, Source

OPENINGS = ("<|tool_call|>", "<tool_call>")


class Granite(ToolFormat):
    is_json = True
    openings = OPENINGS
    special = OPENINGS
    trigger = OPENINGS[0]
    group = Group(OPENINGS[0] + "[", ", ", "]")

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.takes(*OPENINGS)
        yield from source.space()
        yield from source.expect("[")
        while True:
            tree = yield from source.json()
            yield named_call(tree, "arguments")
            yield from source.space()
            if not (yield from source.takes(",")):
                break
        yield from source.takes("]")

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f'{{"name": {json.dumps(function.name)}, "arguments": '
        return {"begin": begin, "schema": schema_of(function), "end": "}"}
