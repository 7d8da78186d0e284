"""Planted bugs of the text modules, each one line of them changed, with the test that must notice it."""

from __future__ import annotations

from backend.text import decoding, words
from tests.mutants.changes import Plant, change

EDGES = "tests/text/test_text_edges.py::"
FAMILIES = "tests/text/test_chat_families.py::"
ROUND_TRIP = "tests/text/test_round_trip.py::"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_spelling_counts_once_for_each_word_that_has_it": (
        change(
            words,
            "words_token_ids",
            ("[list(ids) for ids in dict.fromkeys(spellings)]", "[list(ids) for ids in spellings]"),
        ),
        [EDGES + "test_a_spelling_that_two_words_share_counts_once"],
    ),
    "any_token_of_that_form_is_a_byte": (
        change(decoding, "fallback_byte", ("_BYTE_TOKEN.fullmatch(token)", 're.fullmatch("<0x(..)>", token)')),
        [EDGES + "test_a_token_is_a_byte_exactly_where_the_library_says_so"],
    ),
}
