"""Planted bugs of the text modules, each one line of them changed, with the test that must notice it."""

from __future__ import annotations

from backend.text import chat, decoding, detokenizer, words
from backend.text.chat import ChatTemplate
from backend.text.stop_strings import StopMatcher
from backend.text.stream import TextStream
from tests.mutants.changes import Plant, change

EDGES = "tests/text/test_text_edges.py::"
FAMILIES = "tests/text/test_chat_families.py::"
ROUND_TRIP = "tests/text/test_round_trip.py::"

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
    "any_token_of_that_form_is_a_byte": (
        change(decoding, "fallback_byte", ("_BYTE_TOKEN.fullmatch(token)", 're.fullmatch("<0x(..)>", token)')),
        [EDGES + "test_a_token_is_a_byte_exactly_where_the_library_says_so"],
    ),
    "the_beginning_of_a_stop_string_is_shown": (
        change(StopMatcher, "push", ("len(seen) - self._depth[self._state]", "len(seen)")),
        [ROUND_TRIP + "test_no_stop_string_is_streamed_and_no_text_is_lost"],
    ),
    "what_was_held_back_is_lost_at_the_end": (
        change(TextStream, "flush", ("text + self._matcher.flush()", "text")),
        [ROUND_TRIP + "test_no_stop_string_is_streamed_and_no_text_is_lost"],
    ),
    "the_token_behind_a_stop_string_counts": (
        change(TextStream, "_fewest_tokens", ("(stable + replay.peek()).startswith", "stable.startswith")),
        [ROUND_TRIP + "test_no_stop_string_is_streamed_and_no_text_is_lost"],
    ),
    "an_answers_reasoning_has_one_name": (
        change(chat, "_as_given", ("if reasoning is None", "if True")),
        [FAMILIES + "test_an_answers_reasoning_is_found_under_each_of_its_names"],
    ),
    "tools_do_not_choose_the_template": (
        change(ChatTemplate, "render", ("if tools is None", "if True")),
        [FAMILIES + "test_with_tools_the_template_named_for_them_is_taken"],
    ),
}
