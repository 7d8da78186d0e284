"""{"name": NAME, "parameters": {...}} as the whole answer, several separated by semicolons, or such calls behind <|python_tag|>:
Llama 3.1 to 3.3.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, ToolFormat, named_call, schema_of
from gateway.tool_formats.source import Parsing, Source

TAG = "<|python_tag|>"


class LlamaJson(ToolFormat):
    is_json = True
    openings = (TAG,)
    first = ("{",)
    special = (TAG,)

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.takes(TAG)
        while True:
            tree = yield from source.json()
            yield named_call(tree, "parameters", "arguments")
            yield from source.space()
            if not (yield from source.takes(";", ",")):
                return

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f'{{"name": {json.dumps(function.name)}, "parameters": '
        return {"begin": begin, "schema": schema_of(function), "end": "}"}
