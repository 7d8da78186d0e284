"""CallReader: content and calls of an answer in one of the formats."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.parts import Part
from gateway.tool_formats.format import Functions, ToolFormat
from gateway.tool_formats.source import NotACall, Parsing, Source


class CallReader:
    """A PartReader. What may begin a call is held back until it is known not to, and a call until it is complete."""

    def __init__(self, format: ToolFormat, functions: Functions) -> None:
        self._format, self._functions = format, functions
        self._source = Source()
        self._parsing: Parsing | None = None
        self._is_first = True  # nothing but white space has come so far
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        self._source.text += text
        return list(self._parts())

    def flush(self) -> list[Part]:
        self._source.is_over = True
        return list(self._parts())

    def _parts(self) -> Iterator[Part]:
        source = self._source
        while source.text or self._parsing is not None:
            if self._parsing is None:
                if content := source.take(self._ahead_of_opening()):
                    yield content
                    self._is_first = self._is_first and content.isspace()
                if not self._stands_at_opening():
                    return
                self._parsing, self._is_first = self._format.read(source, self._functions), False
            try:
                found = next(self._parsing)
            except StopIteration:
                self._parsing = None
                source.take(source.at)
                continue
            except NotACall:
                self._parsing = None
                yield source.take(max(1, source.at))
                continue
            if found is None:
                return
            self.num_calls += 1
            source.take(source.at)
            yield found

    def _ahead_of_opening(self) -> int:
        """How many characters are content: those ahead of an opening, or of what may become one."""
        text = self._source.text
        found = [place for opening in self._format.openings if (place := text.find(opening)) >= 0]
        if self._is_first:
            start = len(text) - len(text.lstrip())
            found += [start for opening in self._format.first if text.startswith(opening, start)]
        if found or self._source.is_over:
            return min(found, default=len(text))
        begun = max((_overlap(text, opening) for opening in self._format.openings), default=0)
        return len(text) - begun

    def _stands_at_opening(self) -> bool:
        text = self._source.text
        first = self._format.first if self._is_first else ()
        return text.startswith((*self._format.openings, *first))


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of the text may begin the word."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((size for size in sizes if word.startswith(text[-size:])), 0)
