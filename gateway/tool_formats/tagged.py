"""Formats that write each argument between tags, texts as they are and everything else as JSON:

    Qwen3-Coder    <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>
    GLM-4.5        <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>

with a line break where a space stands here. Whether a value is a text is in the schema of the function.
"""

from __future__ import annotations

from typing import Any

from gateway.messages import Function
from gateway.tool_formats.format import Functions, ToolFormat, call_of, has_listed_parameters, parameters_of, schema_of
from gateway.tool_formats.source import NotACall, Parsing, Source, Waiting, json_value

MOST_UNLISTED = 32  # arguments of one call that no schema lists
OPENING, CLOSING = "<tool_call>", "</tool_call>"


class _Tagged(ToolFormat):
    openings: tuple[str, ...] = (OPENING,)
    special: tuple[str, ...] = (OPENING, CLOSING)
    trigger = OPENING
    key_begin, value_begin, value_end = "", "", ""
    function_end = ""  # the tag behind the arguments
    trims = False  # one line break at each end of a value is not part of it

    def read(self, source: Source, functions: Functions) -> Parsing:
        yield from source.takes(OPENING)
        yield from source.space()
        name = yield from self.read_name(source)
        arguments: dict[str, Any] = {}
        yield from source.space()
        while not (yield from source.takes(self.function_end)):
            yield from source.expect(self.key_begin)
            key = yield from source.until(self.value_begin)
            yield from self._between(source)
            arguments[key] = self._value(name, key, (yield from self._text(source)), functions)
            yield from source.space()
        if self.function_end != CLOSING:
            yield from source.space()
            yield from source.takes(CLOSING)
        yield call_of(name, arguments)

    def read_name(self, source: Source) -> Waiting[str]:
        raise NotImplementedError

    def _between(self, source: Source) -> Waiting[None]:
        return
        yield

    def _text(self, source: Source) -> Waiting[str]:
        """The text of a value: up to the end tag behind which the call goes on as calls do, for it may hold end tags."""
        texts: list[str] = []
        while True:
            texts.append((yield from source.until(self.value_end)))
            place = source.at
            yield from source.space()
            goes_on = yield from source.takes(self.key_begin, self.function_end)
            source.at = place
            if goes_on:
                return self.value_end.join(texts)

    def _value(self, name: str, key: str, text: str, functions: Functions) -> Any:
        if self.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        function = functions.get(name)
        properties = schema_of(function).get("properties") if function is not None else None
        schema = properties.get(key) if isinstance(properties, dict) else None
        if is_text(schema):
            return text
        try:
            return json_value(text)
        except NotACall:
            return text  # only a guide makes sure of the schema

    def written(self, function: Function, begin: str, end: str) -> dict[str, Any]:
        """The structure of a call. Where its schema does not list the arguments, they have any names and are any texts."""
        if function.strict or has_listed_parameters(function):
            return {"begin": begin, "parts": self.parts(function), "end": end}
        line_break = "\n" if self.trims else ""
        words = self.argument_begin("\0") + line_break
        name_begin, _, name_end = words.partition("\0")
        argument = [name_begin, {"until": name_end}, {"until": f"{line_break}{self.value_end}\n"}]
        return {"begin": begin, "parts": [{"optional": argument}] * MOST_UNLISTED, "end": end}

    def parts(self, function: Function) -> list[Any]:
        """The arguments in the order of the schema; those that are not required may be left out."""
        parts: list[Any] = []
        for key, each, is_required in parameters_of(function):
            line_break = "\n" if self.trims else ""
            end = f"{line_break}{self.value_end}\n"
            value: list[Any] = [{"until": end}] if is_text(each) else [{"schema": each}, end]
            written = [self.argument_begin(key) + line_break, *value]
            parts += written if is_required else [{"optional": written}]
        return parts

    def argument_begin(self, key: str) -> str:
        raise NotImplementedError


class QwenTags(_Tagged):
    openings = (OPENING, "<function=")
    key_begin, value_begin, value_end, function_end = "<parameter=", ">", "</parameter>", "</function>"
    trims = True

    def read_name(self, source: Source) -> Waiting[str]:
        yield from source.expect("<function=")
        name = yield from source.name()
        yield from source.expect(">")
        return name

    def argument_begin(self, key: str) -> str:
        return f"<parameter={key}>"

    def structure(self, function: Function) -> dict[str, Any]:
        begin, end = f"{OPENING}\n<function={function.name}>\n", f"</function>\n{CLOSING}"
        return self.written(function, begin, end)


class GlmTags(_Tagged):
    special = (OPENING, CLOSING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_begin, value_begin, value_end, function_end = "<arg_key>", "</arg_key>", "</arg_value>", CLOSING

    def read_name(self, source: Source) -> Waiting[str]:
        name: str = yield from source.name()
        return name

    def _between(self, source: Source) -> Waiting[None]:
        yield from source.space()
        yield from source.expect("<arg_value>")

    def argument_begin(self, key: str) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>"

    def structure(self, function: Function) -> dict[str, Any]:
        return self.written(function, f"{OPENING}{function.name}\n", CLOSING)


def is_text(schema: Any) -> bool:
    """True if values of this schema are texts of any content, which are written as they are."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not schema.keys() & {"enum", "const"}
