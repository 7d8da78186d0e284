"""Regular expressions of schemas, rewritten."""

from __future__ import annotations

import re
from collections.abc import Iterable

# An escape, or a class with its brackets: parentheses in it begin no group.
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LOOKS = re.compile(r"\(\?<?[=!]")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d*,?\d*\})\??")
_EDGES = (r"\b", r"\B")


def of_names(names: Iterable[str]) -> str:
    """A pattern that these texts match, and no others."""
    return f"^({'|'.join(map(re.escape, names))})$"


def without_lookaround(pattern: str) -> str:
    """A pattern that matches all that this one does and asks for nothing around; '' if it asks for nothing, or is none."""
    kept, at = list[str](), 0
    while at < len(pattern):
        if looks := _LOOKS.match(pattern, at):
            at = _group_end(pattern, looks.end())
            if not at:
                return ""
            at = found.end() if (found := _QUANTIFIER.match(pattern, at)) else at
            continue
        atom = _ATOM.match(pattern, at)
        text = atom[0] if atom else pattern[at]
        kept += [] if text in _EDGES else [text]
        at += len(text)
    looser = "".join(kept)
    return "" if looser == pattern else looser


def _group_end(pattern: str, at: int) -> int:
    """Where the group ends that has begun ahead of this place; 0 if it does not end."""
    depth = 1
    while at < len(pattern):
        atom = _ATOM.match(pattern, at)
        text = atom[0] if atom else pattern[at]
        at += len(text)
        depth += {"(": 1, ")": -1}.get(text, 0)
        if not depth:
            return at
    return 0
