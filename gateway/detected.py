"""The formats that a model writes in, found in its chat template. The launcher of the endpoint asks for them."""

from __future__ import annotations

from typing import NamedTuple

from gateway import reasoning
from gateway.tool_formats import table

TOOL_FORMATS = tuple(sorted(table.TOOL_FORMATS))
REASONING_FORMATS = (reasoning.NONE, *sorted(reasoning.REASONING_FORMATS))


class Formats(NamedTuple):
    tools: str
    reasoning: str


def formats_of(template: str) -> Formats:
    """`template`: the source of the chat template, of all of them where a model has several; '' for none."""
    return Formats(table.found_in(template), reasoning.found_in(template))
