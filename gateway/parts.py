"""The parts of an answer, in the order in which the model wrote them: its content, its reasoning, and tool calls.

A reader takes the text of one answer piece by piece. Whatever the pieces are, the parts that it has returned at the end are the
same but for where texts are divided, and together they hold everything that the model wrote, except the marks between them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer, to itself."""

    text: str


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON

    def body(self) -> dict[str, Any]:
        """As chat completions write it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part = str | Reasoning | Call  # a str is content


class PartReader(Protocol):
    @property
    def num_calls(self) -> int:
        """Calls returned so far."""
        ...

    def push(self, text: str) -> list[Part]:
        """Take in more text; returns the parts that are known then. A possible beginning of a mark or call is held back, and a
        call until it is complete.
        """
        ...

    def flush(self) -> list[Part]:
        """The answer is over: the parts of what was held back. A call that was cut off is content."""
        ...


class PlainReader:
    """For answers that are content and nothing else."""

    num_calls = 0

    def push(self, text: str) -> list[Part]:
        return [text] if text else []

    def flush(self) -> list[Part]:
        return []


class WholeAnswer(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]


def whole_answer(parts: Iterable[Part]) -> WholeAnswer:
    """The parts of one answer by their kinds."""
    contents, reasoning, calls = list[str](), list[str](), list[Call]()
    for part in parts:
        match part:
            case str():
                contents.append(part)
            case Reasoning():
                reasoning.append(part.text)
            case Call():
                calls.append(part)
    return WholeAnswer("".join(contents), "".join(reasoning), calls)


def new_call(name: str, arguments: Any, call_id: str | None = None) -> Call:
    """A call with the JSON text of its arguments. Raises ValueError for what JSON cannot write, such as an infinite number,
    and RecursionError for what is nested too deeply.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        text = json.dumps(arguments, allow_nan=False)
    return Call(call_id or f"call_{secrets.token_hex(12)}", name, text)
