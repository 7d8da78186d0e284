"""CallReader: content and calls of an answer in one of the formats."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.parts import Part
from gateway.tool_formats.format import Functions, ToolFormat
from gateway.tool_formats.source import NotACall, Parsing, Source
from gateway.tool_formats.whole import BEGINNINGS, read_whole


class CallReader:
    """A PartReader. What may begin a call is held back until it is known not to, and a call until it is complete."""

    def __init__(
        self, format: ToolFormat, functions: Functions, may_be_whole: bool = True, are_parallel: bool = True
    ) -> None:
        """`may_be_whole`: an answer may be calls without marks, where the format is JSON; several if `are_parallel`."""
        self._are_parallel = are_parallel
        self._format, self._functions = format, functions
        self._whole = BEGINNINGS if may_be_whole and format.is_json and functions else ()
        self._source = Source()
        self._parsing: Parsing | None = None
        self._reads_whole = False  # the parser is that of an answer without marks
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
                parsing = self._begun()
                if parsing is None:
                    return
                self._parsing, self._is_first = parsing, False
            try:
                found = next(self._parsing)
            except StopIteration:
                self._parsing = None
                source.take(source.at)
                continue
            except NotACall:
                size = 1 if self._reads_whole else max(1, source.at)  # a call with its marks may stand in what was read
                self._parsing = None
                yield source.take(size)
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
            found += [start for opening in (*self._format.first, *self._whole) if text.startswith(opening, start)]
        if found or self._source.is_over:
            return min(found, default=len(text))
        if self._is_first and any(opening.startswith(text[start:]) for opening in self._whole):
            return start
        begun = max((_overlap(text, opening) for opening in self._format.openings), default=0)
        return len(text) - begun

    def _begun(self) -> Parsing | None:
        """The parser of the calls at whose opening the source stands; None if it stands at none."""
        text = self._source.text
        first = self._format.first if self._is_first else ()
        self._reads_whole = False
        if text.startswith((*self._format.openings, *first)):
            return self._format.read(self._source, self._functions)
        may_open = not self._source.is_over and any(opening.startswith(text) for opening in self._format.openings)
        if self._is_first and text.startswith(self._whole) and not may_open:
            self._reads_whole = True
            return read_whole(self._source, self._functions, self._are_parallel)
        return None


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of the text may begin the word."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((size for size in sizes if word.startswith(text[-size:])), 0)
