"""Reasoning: the marks that families of models put around it, and how it is separated from the answer.

A new kind of marks is a row of REASONING_FORMATS. Where the chat template begins the reasoning itself (DeepSeek R1,
Qwen3-Thinking), the Triton model puts that mark ahead of the output's text, so that readers need not know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.parts import Part, PartReader, Reasoning
from gateway.tool_formats import harmony

NONE = "none"


class Marks(NamedTuple):
    """`follow`: what stands between the reasoning and an answer whose form is given."""

    start: str
    end: str
    follow: str = ""
    is_always: bool = False  # an answer whose form is given has reasoning ahead of it

    @property
    def special(self) -> tuple[str, ...]:
        """Marks that are special tokens of some tokenizers."""
        return (self.start, self.end)

    def field(self, max_tokens: int | None) -> dict[str, Any]:
        """The field `reasoning` of the Triton model's request."""
        field: dict[str, Any] = {"start": self.start, "end": self.end}
        if self.follow:
            field |= {"follow": self.follow}
        if self.is_always:
            field |= {"is_always": True}
        return field if max_tokens is None else field | {"max_tokens": max_tokens}


HARMONY = Marks(
    f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
    harmony.END,
    f"{harmony.START}assistant{harmony.CHANNEL}final{harmony.MESSAGE}",
    is_always=True,
)
REASONING_FORMATS: dict[str, Marks] = {  # a chat template that holds the end mark belongs to a model of this format
    "harmony": HARMONY,
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "cohere": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
}


def found_in(template: str) -> str:
    """The name of the format that a chat template shows; NONE if none does."""
    if harmony.CHANNEL in template:
        return "harmony"
    others = (name for name, marks in REASONING_FORMATS.items() if name != "harmony" and marks.end in template)
    return next(others, NONE)


class ReasoningReader:
    """A PartReader: what stands between the marks at the beginning of an answer is reasoning, and `reader` reads what follows.

    White space next to the marks is part of neither.
    """

    def __init__(self, marks: Marks, reader: PartReader) -> None:
        self._marks, self._reader = marks, reader
        self._held = ""
        self._has_reasoning = False  # some of it has come
        self._read = self._read_start

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def push(self, text: str) -> list[Part]:
        return self._read(text)

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._read == self._read_reasoning:  # cut off
            rest = held.rstrip()
            return [Reasoning(rest)] if rest else []
        return [*self._reader.push(held), *self._reader.flush()]

    def _read_start(self, text: str) -> list[Part]:
        self._held += text
        stripped = self._held.lstrip()
        if stripped.startswith(self._marks.start):
            self._held, self._read = "", self._read_reasoning
            return self._read(stripped[len(self._marks.start) :])
        if self._marks.start.startswith(stripped):
            return []
        held, self._held, self._read = self._held, "", self._reader.push
        return self._read(held)

    def _read_reasoning(self, text: str) -> list[Part]:
        self._held += text
        if not self._has_reasoning:
            self._held = self._held.lstrip()
            self._has_reasoning = bool(self._held)
        place = self._held.find(self._marks.end)
        if place >= 0:
            reasoning, rest = self._held[:place].rstrip(), self._held[place + len(self._marks.end) :]
            self._held, self._read = "", self._read_gap
            parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
            return parts + self._read(rest)
        keep = _begun(self._held, self._marks.end)
        told = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(told) :]
        return [Reasoning(told)] if told else []

    def _read_gap(self, text: str) -> list[Part]:
        if not (rest := text.lstrip()):
            return []
        self._read = self._reader.push
        return self._read(rest)


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


class WithoutReasoning:
    """A PartReader that leaves the reasoning out."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def push(self, text: str) -> list[Part]:
        return [part for part in self._reader.push(text) if not isinstance(part, Reasoning)]

    def flush(self) -> list[Part]:
        return [part for part in self._reader.flush() if not isinstance(part, Reasoning)]
