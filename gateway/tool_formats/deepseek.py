"""DeepSeek's calls: CALLS CALL NAME SEPARATOR {...} CALL_END, further ones, and CALLS_END, in V3.1 and later.

V3 and R1 write "function" for the name, and behind the separator the name, a line break and the arguments as a block of code
(```json). Both are read in either format.
"""

from __future__ import annotations

from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, Group, ToolFormat, call_of, schema_of
from gateway.tool_formats.source import Parsing, Source

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31(ToolFormat):
    is_json = True
    openings = (CALLS,)
    special = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
    trigger = CALLS
    group = Group(CALLS, "", CALLS_END)

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.expect(CALLS)
        while True:
            yield from source.space()
            yield from source.expect(CALL)
            name = yield from source.name()
            yield from source.expect(SEPARATOR)
            yield from source.space()
            is_block = name == "function" and not source.text.startswith("{", source.at)
            if is_block:
                name = yield from source.name()
                yield from source.space()
                yield from source.expect("```json")
            arguments = yield from source.json()
            yield from source.space()
            if is_block:
                yield from source.expect("```")
            yield from source.expect(CALL_END)
            yield call_of(name, arguments)
            if not (yield from source.goes_on(CALLS_END)):
                return

    def structure(self, function: Function) -> dict[str, Any]:
        return {"begin": f"{CALL}{function.name}{SEPARATOR}", "schema": schema_of(function), "end": CALL_END}


class DeepSeekV3(DeepSeekV31):
    group = Group(CALLS, "\n", CALLS_END)

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f"{CALL}function{SEPARATOR}{function.name}\n```json\n"
        return {"begin": begin, "schema": schema_of(function), "end": "\n```" + CALL_END}
