"""Planted bugs of Anthropic's Messages API, and of the ids of tokens that answers tell."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.wires import everbatch
from gateway import anthropic_turns, errors, invalid, middleware
from gateway.answers import Running
from gateway.anthropic_answers import MessageWriter
from gateway.chunks import Chunks, _Ids
from gateway.middleware import Middleware
from gateway.request_context import RequestContext
from tests.mutants.changes import Plant, change, change_everywhere

ANSWERS = ["tests/gateway/test_anthropic.py"]
ERRORS = ["tests/gateway/test_anthropic_errors.py"]
EVERBATCH = ["tests/serving/test_everbatch_model.py"]
IDS = ["tests/gateway/test_token_ids.py"]
SESSION = ["tests/gateway/test_agent_session.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    # The answer.
    "cached_tokens_count_as_input_too": (
        change(MessageWriter, "_usage", ("self._prompt_tokens - self._cached_tokens", "self._prompt_tokens")),
        ANSWERS,
    ),
    "every_prompt_was_written_to_the_cache": (
        change(MessageWriter, "__init__", ("wants_caching(message)", "True")),
        ANSWERS,
    ),
    "the_first_event_knows_nothing_of_the_prompt": (
        change(MessageWriter, "_count", ("if piece.prompt is not None:", "if False:")),
        ANSWERS,
    ),
    "a_full_context_is_the_client_s_limit": (
        change(MessageWriter, "_stop_reason", ("self._output_tokens < self._message.max_tokens", "False")),
        ANSWERS,
    ),
    "a_stop_string_is_the_model_s_own_end": (
        change(MessageWriter, "_stop_reason", ("self._stop_sequence is not None", "False")),
        ANSWERS,
    ),
    "white_space_ahead_of_a_call_is_text": (
        change(MessageWriter, "_add", ("text.rstrip()", "text")),
        ANSWERS,
    ),
    "white_space_at_the_end_is_lost": (
        change(MessageWriter, "take", ("and self._blank and", "and False and")),
        ANSWERS,
    ),
    "a_block_goes_on_while_the_next_begins": (
        change(MessageWriter, "events", ("*_ended(new.place - 1), ", "")),
        ANSWERS,
    ),
    "omitted_reasoning_is_shown": (
        change(MessageWriter, "_add", ('"" if self._hides_reasoning else part.text', "part.text")),
        SESSION,
    ),
    # The request.
    "blocks_of_a_text_run_into_each_other": (
        change(anthropic_turns._Turn, "shown", ('"" if self.role == "assistant" else PARAGRAPH', '""')),
        ANSWERS,
    ),
    "errors_of_tools_look_like_results": (
        change(anthropic_turns, "_result", ("if block.is_error", "if False")),
        ANSWERS,
    ),
    "results_of_tools_are_one_turn": (
        change(anthropic_turns, "turns_of", ("isinstance(block, ToolResultBlock)", "False")),
        SESSION,
    ),
    "an_answer_that_comes_last_is_not_continued": (
        change(anthropic_turns, "conversation", ('last.role == "assistant"', "False")),
        ANSWERS,
    ),
    "what_differs_from_request_to_request_is_shown_first": (
        change(anthropic_turns, "_system", ("one.text.startswith(ACCOUNTS)", "False")),
        SESSION,
    ),
    "a_mark_in_a_tool_is_not_seen": (
        change_everywhere(anthropic_turns.wants_caching, ("*(message.tools or [])", "")),
        ANSWERS,
    ),
    "a_model_without_reasoning_gets_a_budget": (
        change(anthropic_turns, "_reasoning", ("is_on and dialect.marks is not None", "is_on")),
        SESSION,
    ),
    "reasoning_that_is_switched_off_is_shown": (
        change(anthropic_turns, "_reasoning", ('found["include_reasoning"] = is_on', "pass")),
        SESSION,
    ),
    "calls_may_always_be_several": (
        change(anthropic_turns, "_tools", ("if choice.disable_parallel_tool_use:", "if False:")),
        ANSWERS,
    ),
    # Errors and keys.
    "a_full_server_is_the_client_s_fault": (
        change_everywhere(errors.anthropic_refusal, ("529 if isinstance(error, Overloaded)", "529 if False")),
        ERRORS,
    ),
    "errors_are_always_openai_s": (
        change(RequestContext, "refusal", ("if self.is_anthropic", "if False")),
        ERRORS,
    ),
    "only_one_header_has_keys": (
        change(middleware, "_client", ('headers.get("x-api-key", "").strip()', '""')),
        ERRORS,
    ),
    "a_client_s_share_is_the_server_s": (
        change(Running, "enter", ("too_many_of_one(", "overloaded(")),
        ERRORS,
    ),
    "only_who_names_the_version_speaks_this_api": (
        change(Middleware, "_check", ('scope["path"].startswith(MESSAGES) or', "")),
        ERRORS,
    ),
    "an_image_is_another_unknown_type": (
        change(invalid, "_other_form", ("if tag in _TEXT_ONLY_FORMS:", "if False:")),
        ERRORS,
    ),
    # Ids.
    "ids_that_were_held_back_are_lost": (change(_Ids, "take", ("self._untold +=", "self._untold =")), IDS),
    "the_prompt_is_told_with_each_event": (change(_Ids, "fields", ("prompt, self._prompt = b", "prompt, _ = b")), IDS),
    "the_ids_of_one_choice_are_those_of_all": (change(Chunks, "of", ("self._ids[index]", "self._ids[0]")), IDS),
    "only_the_first_sequence_is_told_of_the_prompt": (
        change(everbatch, "renderer", ("untold.remove(delta.sequence)", "untold.clear()")),
        EVERBATCH,
    ),
    "ids_of_the_prompt_are_always_told": (
        change(everbatch, "renderer", ('asked.tell_prompt == "token_ids"', "True")),
        EVERBATCH,
    ),
}
