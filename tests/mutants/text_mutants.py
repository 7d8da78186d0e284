"""Planted bugs of the text modules, each one line of them changed, with the test that must notice it."""

from __future__ import annotations

from backend.text import detokenizer, words
from backend.text.chat import ChatTemplate
from tests.mutants.changes import Plant, change

EDGES = "tests/text/test_text_edges.py::"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_chat_of_the_greatest_length_is_refused": (
        change(ChatTemplate, "_run", ("if room < 0", "if room <= 0")),
        [EDGES + "test_a_rendered_chat_may_be_as_long_as_the_cap"],
    ),
    "a_long_prompt_is_cut_within_a_run_of_bytes": (
        change(detokenizer, "_relevant_tail", (" and fallback_byte(token) is None", "")),
        [EDGES + "test_a_long_prompt_is_not_cut_within_a_run_of_bytes"],
    ),
    "a_word_with_a_space_in_front_has_no_spelling_without_it": (
        change(words, "word_token_ids", ('word.lstrip(" ") or word', "word")),
        [EDGES + "test_a_word_with_a_space_in_front_stands_for_the_spellings_of_the_word"],
    ),
    "a_spelling_counts_once_for_each_word_that_has_it": (
        change(
            words,
            "words_token_ids",
            ("[list(ids) for ids in dict.fromkeys(spellings)]", "[list(ids) for ids in spellings]"),
        ),
        [EDGES + "test_a_spelling_that_two_words_share_counts_once"],
    ),
}
