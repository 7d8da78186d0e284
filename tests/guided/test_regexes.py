"""Regular expressions are rewritten without a change of what else they match."""

from __future__ import annotations

import pytest

from backend.api.guide import Guide, GuideType
from backend.guided.regexes import with_ascii_digits
from tests.guided.families import made
from tests.guided.test_added_tokens import LIBRARIES, backend, takes


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{3}-\d{4}", "[0-9]{3}-[0-9]{4}"),
        (r"[\d.]+", "[0-9.]+"),
        (r"\\d", r"\\d"),
        (r"[^\]\d]\D", r"[^\]0-9][^0-9]"),
        (r"a\.b\w", r"a\.b\w"),
    ],
)
def test_digits_are_those_of_ascii(pattern: str, expected: str) -> None:
    assert with_ascii_digits(pattern) == expected


@LIBRARIES
@pytest.mark.parametrize(("text", "is_held"), [("12-3", True), ("1\u0663-3", False), ("\U0001fbf8\U0001fbf8-3", False)])
def test_both_libraries_take_ascii_digits_for_an_escaped_d(library: str, text: str, is_held: bool) -> None:
    """A digit of Arabic and the segmented digits, of whose bytes a model likes the first four."""
    family = made("qwen 2.5")
    vocabulary = family.vocabulary
    matcher = backend(library, "qwen 2.5").compile(Guide(GuideType.REGEX, r"\d{2}-\d")).matcher()
    ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    assert takes(matcher, ids, vocabulary.size) == is_held
