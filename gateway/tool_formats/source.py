"""Source: the text of an answer for parsers, which wait for more of it where it ends.

A parser is a generator. It yields None where it needs more text, and a Call for each one that it has read. Each character is
looked at once, whatever the pieces in which the text comes, because a parser keeps its place while it waits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TypeVar

from gateway.parts import Call

_Found = TypeVar("_Found")
Waiting = Generator[None, None, _Found]  # a step of a parser, which returns what it has found
Parsing = Generator[Call | None, None, None]
MAX_DEPTH = 64  # brackets within brackets in one call
_JSON = {
    False: re.compile(r'["{}\[\]]'),
    True: re.compile(r'["\\]'),
}  # characters that change the state outside of a string, and in one
_SPACE = re.compile(r"\s*")
NAME = re.compile(r"[a-zA-Z0-9_.-]*")
MAX_NAME = 256


class NotACall(Exception):
    """The text up to `Source.at` is no call. It is content."""


class Source:
    """`text` from `at` on is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False  # no more text comes

    def take(self, size: int) -> str:
        """Remove so many characters from the beginning of the text; what is left is not read yet."""
        taken, self.text, self.at = self.text[:size], self.text[size:], 0
        return taken

    def more(self) -> Waiting[None]:
        """Wait for more text. Raises NotACall when none comes."""
        if self.is_over:
            self.at = len(self.text)
            raise NotACall
        yield

    def space(self) -> Waiting[None]:
        """Skip white space, up to a character that is none, or the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.is_over:
                return
            yield

    def takes(self, *words: str) -> Waiting[str]:
        """Skip the first of these words with which the text goes on, and return it; '' if it goes on with none."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self.at += len(word)
                    return word
                if word.startswith(rest) and not self.is_over:
                    break
            else:
                return ""
            yield

    def expect(self, word: str) -> Waiting[None]:
        """Skip a word. Raises NotACall when the text goes on otherwise."""
        if not (yield from self.takes(word)):
            raise NotACall

    def goes_on(self, end: str) -> Waiting[bool]:
        """Skip white space, and what ends a run of calls. False if it has ended, or the answer has."""
        yield from self.space()
        if (yield from self.takes(end)):
            return False
        return not self.is_over or self.at < len(self.text)

    def until(self, *words: str) -> Waiting[str]:
        """Skip up to and with the first occurrence of any of these words; returns the text ahead of it."""
        start = searched = self.at
        longest = max(map(len, words))
        while True:
            places = [(place, word) for word in words if (place := self.text.find(word, searched)) >= 0]
            if places:
                place, word = min(places)
                self.at = place + len(word)
                return self.text[start:place]
            searched = max(searched, len(self.text) - longest + 1)
            yield from self.more()

    def name(self) -> Waiting[str]:
        """Skip the name of a function. Raises NotACall where there is none."""
        start = self.at
        while True:
            found = NAME.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at - start > MAX_NAME:
                raise NotACall
            if self.at < len(self.text):
                break
            yield from self.more()
        if self.at == start:
            raise NotACall
        return self.text[start : self.at]

    def json(self) -> Waiting[Any]:
        """Skip a JSON object, with white space ahead of it; returns its value. Raises NotACall for anything else."""
        yield from self.space()
        yield from self.expect("{")
        start, depth, place, is_string = self.at - 1, 1, self.at, False
        while depth:
            found = _JSON[is_string].search(self.text, place)
            if found is None:
                place = max(place, len(self.text))  # beyond the end behind a backslash
                yield from self.more()
                continue
            place = found.end()
            match found.group():
                case '"':
                    is_string = not is_string
                case "\\":
                    place += 1
                case "{" | "[":
                    depth += 1
                case _:
                    depth -= 1
            self.at = place
            if depth > MAX_DEPTH:
                raise NotACall
        return json_value(self.text[start : self.at])


def json_value(text: str) -> Any:
    """Raises NotACall for a text that is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise NotACall from None


def _no_number(name: str) -> Any:
    raise ValueError(name)
