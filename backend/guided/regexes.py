"""Regular expressions of clients, rewritten."""

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


def with_ascii_digits(pattern: str) -> str:
    r"""The pattern with `\d` for 0 to 9, as ECMAScript and xgrammar read it.

    To Rust's `regex` it is any digit of Unicode, and models then begin with the bytes of emojis.
    """
    kept, at = list[str](), 0
    while at < len(pattern):
        atom = _ATOM.match(pattern, at)
        text = atom[0] if atom else pattern[at]
        at += len(text)
        if text.startswith("["):
            text = re.sub(r"\\(.)", lambda escape: "0-9" if escape[1] == "d" else escape[0], text, flags=re.DOTALL)
        kept.append({r"\d": "[0-9]", r"\D": "[^0-9]"}.get(text, text))
    return "".join(kept)


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
