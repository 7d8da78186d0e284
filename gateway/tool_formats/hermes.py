"""<tool_call>{"name": NAME, "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3 and many others."""

from __future__ import annotations

import json
from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, ToolFormat, named_call, schema_of
from gateway.tool_formats.source import Parsing, Source

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    is_json = True
    openings = (OPENING,)
    special = (OPENING, CLOSING)
    trigger = OPENING

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.expect(OPENING)
        tree = yield from source.json()
        yield from source.space()
        yield from source.expect(CLOSING)
        yield named_call(tree, "arguments")

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f'{OPENING}{{"name": {json.dumps(function.name)}, "arguments": '
        return {"begin": begin, "schema": schema_of(function), "end": "}" + CLOSING}
