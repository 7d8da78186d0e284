"""Planted bugs of the text modules, each one line of them changed, with the test that must notice it."""

from __future__ import annotations

from backend.text import decoding
from tests.mutants.changes import Plant, change

EDGES = "tests/text/test_text_edges.py::"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "any_token_of_that_form_is_a_byte": (
        change(decoding, "fallback_byte", ("_BYTE_TOKEN.fullmatch(token)", 're.fullmatch("<0x(..)>", token)')),
        [EDGES + "test_a_token_is_a_byte_exactly_where_the_library_says_so"],
    ),
}
