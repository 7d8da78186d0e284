"""LeastTokens: a number of tokens that a text has at least, found at a hundredth of the cost of tokenising it.

A token holds only so many digits, so a text with more digits has more tokens. The same count is made of letters, of punctuation,
and of all three together. They are the visible ASCII characters, each of which is a token of its own in the tokenizers that this
applies to: none of them becomes an unknown token, of which a whole run is one. Blanks and all other characters do not count,
because a normalizer may compose or drop them.

Steps that are not known to leave visible ASCII characters alone make the bound 0, which refuses nothing.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

CLASSES = tuple(each.encode() for each in (string.digits, string.ascii_letters, string.punctuation))
_KEPT = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_COMPOSED = {"NFC", "NFKC", "NFD", "NFKD"}  # normalizers that leave a text alone which is ASCII as a whole


class LeastTokens:
    """Does not change after its construction, which reads the whole vocabulary (about 0.2 s for 150,000 tokens)."""

    def __init__(self, state: dict[str, Any], vocab: Iterable[str]) -> None:
        """`state`: the content of tokenizer.json. `vocab`: the texts of all tokens, added ones included."""
        self._ascii_only = False
        self._classes: list[
            tuple[bytes, int]
        ] = []  # all bytes but those of a class, and how many of it a token has at most
        if not self._applies(state):
            return
        texts = sorted((token.encode("utf-8", "replace") for token in vocab), key=len, reverse=True)
        single = {text for text in texts if len(text) == 1}
        for chars in (*CLASSES, b"".join(CLASSES)):
            counted = {byte for byte in chars if bytes([byte]) in single}
            others = bytes(set(range(256)) - counted)
            if most := _most(texts, others):
                self._classes.append((others, most))

    def of(self, data: bytes) -> int:
        """The bound for a text in UTF-8."""
        if self._ascii_only and not data.isascii():
            return 0
        return max((-(-len(data.translate(None, others)) // most) for others, most in self._classes), default=0)

    def _applies(self, state: dict[str, Any]) -> bool:
        model = state["model"]
        kind = model.get("type")
        if kind not in ("BPE", "Unigram") or any(
            model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        ):
            return False
        return all(map(self._keeps, _steps(state.get("normalizer"), "normalizers"))) and all(
            map(_cuts, _steps(state.get("pre_tokenizer"), "pretokenizers"))
        )

    def _keeps(self, normalizer: dict[str, Any]) -> bool:
        """True if a normalizer leaves visible ASCII characters alone."""
        kind = normalizer["type"]
        self._ascii_only |= kind in _COMPOSED
        return kind in {*_COMPOSED, "Prepend"} or (kind == "Replace" and normalizer.get("pattern") == {"String": " "})


def _most(texts: list[bytes], others: bytes) -> int:
    """The most bytes of a text that are none of `others`. `texts`: the longest first."""
    most = 0
    for text in texts:
        if len(text) <= most:
            break
        most = max(most, len(text.translate(None, others)))
    return most


def _cuts(pre_tokenizer: dict[str, Any]) -> bool:
    """True if a pre-tokenizer keeps all characters."""
    kind = pre_tokenizer["type"]
    return kind in _KEPT or (
        kind in ("Split", "Punctuation") and pre_tokenizer.get("behavior") not in (None, "Removed")
    )


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, where it is a sequence of them."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[name] for step in _steps(each, name)]
