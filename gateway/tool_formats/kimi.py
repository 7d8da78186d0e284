"""<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|> within a section: Kimi K2."""

from __future__ import annotations

from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, Group, ToolFormat, call_of, schema_of
from gateway.tool_formats.source import Parsing, Source

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Kimi(ToolFormat):
    is_json = True
    openings = (SECTION,)
    special = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    trigger = SECTION
    group = Group(SECTION, "", SECTION_END)

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.expect(SECTION)
        while True:
            yield from source.space()
            yield from source.expect(CALL)
            yield from source.space()
            name = yield from source.name()
            number = ""
            if (yield from source.takes(":")):
                number = yield from source.name()
            yield from source.space()
            yield from source.expect(ARGUMENTS)
            arguments = yield from source.json()
            yield from source.space()
            yield from source.expect(CALL_END)
            call_id = f"{name}:{number}" if number else None  # the template shows ids, which the model goes on counting
            yield call_of(name.removeprefix("functions."), arguments, call_id)
            if not (yield from source.goes_on(SECTION_END)):
                return

    def structure(self, function: Function) -> dict[str, Any]:
        begin = f"{CALL}functions.{function.name}:0{ARGUMENTS}"
        return {"begin": begin, "schema": schema_of(function), "end": CALL_END}
