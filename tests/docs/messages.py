"""The texts in the sources that a person may see: string literals, with a gap where a value is filled in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("backend", "client", "compat", "deploy", "gateway", "kernels")
GAP = "\0"


def all_texts() -> str:
    """Every string literal of the rooms."""
    return "\n".join(text for room in ROOMS for path in (ROOT / room).rglob("*.py") for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def fragments(message: str) -> list[str]:
    """The parts of a message of a page that stand in the source as they are: what lies between its `...`."""
    return [part for part in message.split("...") if len(part.strip()) > 3]
