"""[NAME(KEY=VALUE, ...), ...] as the whole answer, in Python's syntax: Llama 3.2 and 4, ToolACE, LFM2. Llama 4 and LFM2 put marks
around it. Values are literals of Python or JSON.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from gateway.messages import Function
from gateway.parts import Call
from gateway.tool_formats.format import Functions, Group, ToolFormat, call_of, parameters_of
from gateway.tool_formats.source import MAX_DEPTH, NAME, NotACall, Parsing, Source, Waiting

MARKS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
}
_CODE = {"": re.compile(r"""["'()\[\]{}]"""), '"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_OF_JSON = {"true": True, "false": False, "null": None}


class Pythonic(ToolFormat):
    openings = tuple(MARKS)
    first = ("[",)
    special = (*MARKS, *MARKS.values())
    group = Group("[", ", ", "]")

    def read(self, source: Source, functions: Functions) -> Parsing:
        mark = yield from source.takes(*MARKS)
        yield from source.space()
        calls = _calls((yield from _list(source)))
        if mark:
            yield from source.space()
            yield from source.takes(MARKS[mark])
        yield from calls

    def structure(self, function: Function) -> dict[str, Any]:
        parts: list[Any] = []
        for name, schema, is_required in parameters_of(function):
            if name.isidentifier() and is_required:
                parts += [f"{', ' if parts else ''}{name}=", {"schema": schema}]
        return {"begin": f"{function.name}(", "parts": parts, "end": ")"}


def _list(source: Source) -> Waiting[str]:
    """Skip a list in Python's syntax, and return its text. Raises NotACall where there is none."""
    yield from source.expect("[")
    start, depth, place, quote = source.at - 1, 1, source.at, ""
    while depth:
        found = _CODE[quote].search(source.text, place)
        if found is None:
            place = max(place, len(source.text))
            yield from source.more()
            continue
        place, mark = found.end(), found.group()
        if mark == "\\":
            place += 1
        elif mark in "\"'":
            quote = "" if quote else mark
        else:
            depth += 1 if mark in "([{" else -1
        source.at = place
        if depth > MAX_DEPTH:
            raise NotACall
    return source.text[start : source.at]


def _calls(text: str) -> list[Call]:
    """Raises NotACall for a list of anything else than calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of escapes that it does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NotACall
        return [_call(each) for each in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACall from None


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise NotACall
    name = ast.unparse(node.func)
    if NAME.fullmatch(name) is None:
        raise NotACall
    return call_of(name, {str(each.arg): _value(each.value) for each in node.keywords})


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _OF_JSON:
            return _OF_JSON[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values)}
    found = ast.literal_eval(node)
    if not isinstance(found, str | int | float | None):
        raise NotACall
    return found


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise NotACall
    return node.value
