"""Calls that a model writes without the marks of its format: the whole answer is an object that names an offered function and has
an object of arguments, or several of them (a list, or one behind the other), bare or as a block of code (```json). Qwen2.5-Coder
answers so.
"""

from __future__ import annotations

from typing import Any

from gateway.parts import Call
from gateway.tool_formats.format import Functions, named_call
from gateway.tool_formats.source import NotACall, Parsing, Source, Waiting

FENCE = "```"
BEGINNINGS = ("{", "[", FENCE)
_LANGUAGES = ("json", "JSON", "tool_call")
_ARGUMENTS = ("arguments", "parameters")
_FIRST_KEYS = tuple(f'{key}"' for key in ("name", *_ARGUMENTS))


def read_whole(source: Source, functions: Functions, are_parallel: bool) -> Parsing:
    """Read such an answer, at whose beginning the source stands; yields the calls at its end, one at most unless `are_parallel`.
    Raises NotACall as soon as the answer is known to be none, wherever the source stands then.
    """
    is_block = yield from source.takes(FENCE)
    if is_block:
        yield from source.takes(*_LANGUAGES)
        yield from source.space()
    is_list = yield from source.takes("[")
    calls = [(yield from _offered(source, functions))]
    while are_parallel and (yield from source.takes("," if is_list else "{")):
        source.at -= 0 if is_list else 1  # the brace is the object's own
        calls.append((yield from _offered(source, functions)))
    for closing in (["]"] if is_list else []) + ([FENCE] if is_block else []):
        yield from source.expect(closing)
        yield from source.space()
    if source.at < len(source.text):
        raise NotACall
    yield from calls


def _offered(source: Source, functions: Functions) -> Waiting[Call]:
    """Skip one call, and the white space around it."""
    yield from source.space()
    place = source.at
    yield from _head(source, functions)
    source.at = place
    tree: Any = yield from source.json()
    call = named_call(tree, *_ARGUMENTS)
    if call.name not in functions or not call.arguments.startswith("{"):
        raise NotACall
    yield from source.space()
    return call


def _head(source: Source, functions: Functions) -> Waiting[None]:
    """Skip the beginning of an object. Raises NotACall where its first key is none of a call's, or the name none of these."""
    yield from source.expect("{")
    yield from source.space()
    yield from source.expect('"')
    key = yield from source.takes(*_FIRST_KEYS)
    if not key:
        raise NotACall
    if key == _FIRST_KEYS[0]:
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        yield from source.expect('"')
        if not (yield from source.takes(*(f'{name}"' for name in functions))):
            raise NotACall
