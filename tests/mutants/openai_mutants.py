"""Planted bugs of what the OpenAI endpoint does besides plain answers: scored prompts, functions in /v1/responses, parties."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.wires import everbatch
from backend.serving.work import Work
from backend.text.chat import ChatTemplate
from gateway import chunks, core, invalid, keys, logprobs, response_output, translate
from gateway.triton_client import Piece
from tests.mutants.changes import Plant, change, change_everywhere

ADAPTERS = ["tests/gateway/test_adapters.py"]
COMPLETIONS = ["tests/gateway/test_completions.py"]
CONVERSATIONS = ["tests/gateway/test_conversations.py"]
ERRORS = ["tests/gateway/test_errors.py"]
EVERBATCH = ["tests/serving/test_everbatch_model.py"]
KEYS = ["tests/gateway/test_keys.py"]
RESPONSE_TOOLS = ["tests/gateway/test_response_tools.py"]
TAKEN = ["tests/gateway/test_taken_keys.py"]
FAMILIES = ["tests/text/test_chat_families.py"]
TEMPLATES = ["tests/text/test_text_chat.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    # Scores of prompts.
    "scores_of_the_prompt_come_behind_the_others": (
        change(
            Piece,
            "shown_logprobs",
            ("self.prompt_logprobs + (self.logprobs or [])", "(self.logprobs or []) + self.prompt_logprobs"),
        ),
        COMPLETIONS,
    ),
    "slices_of_a_prompt_lose_a_token": (
        change(chunks.CompletionChunks, "_body", ("range(SLICE,", "range(SLICE + 1,")),
        COMPLETIONS,
    ),
    "the_less_likely_of_the_same_text_is_told": (
        change(
            logprobs, "_top", ("found.setdefault(_name(one), one.logprob or 0.0)", "found[_name(one)] = one.logprob")
        ),
        COMPLETIONS,
    ),
    "no_tokens_are_the_default_number": (change(translate, "_limits", ("if given:", "if any(given):")), COMPLETIONS),
    "every_echo_asks_for_scores": (
        change(
            translate,
            "completions",
            ('common["prompt_logprobs"] = message.logprobs', "pass"),
            ('common["echo"] = True', 'common |= {"echo": True, "prompt_logprobs": message.logprobs or 0}'),
        ),
        COMPLETIONS,
    ),
    "only_the_first_sequence_tells_the_prompt": (
        change(everbatch._OfPrompt, "once", ("sequence not in self._untold", "sequence")),
        EVERBATCH,
    ),
    "a_long_prompt_s_scores_take_no_time": (
        change(Work, "takes_long", ("* of_prompt > MANY_LOG_PROBS", "* 0 > MANY_LOG_PROBS")),
        EVERBATCH,
    ),
    # What the chat template is told.
    "template_variables_replace_the_messages": (
        change(ChatTemplate, "render", ('({"messages"} | own.keys())', "set()")),
        TEMPLATES,
    ),
    "a_system_message_that_is_left_out_holds_the_tools": (
        lambda set_attribute: set_attribute(ChatTemplate, "_takes_system", True),
        FAMILIES,
    ),
    "template_variables_are_not_counted": (
        change(ChatTemplate, "_check", ("(further, MAX_DEPTH", "(None, MAX_DEPTH")),
        TEMPLATES,
    ),
    "the_end_token_is_shown_with_the_others": (
        change_everywhere(everbatch.parse, ("else request.end_ids", "else ()")),
        EVERBATCH,
    ),
    "what_the_client_gives_yields_to_the_effort": (
        change(
            translate,
            "_template_variables",
            (
                "{name: value for name, value in own.items() if value is not None} | (given or {})",
                "(given or {}) | {name: value for name, value in own.items() if value is not None}",
            ),
        ),
        TAKEN,
    ),
    "later_texts_of_a_message_replace_earlier_ones": (
        change(response_output.Output, "_grown", ("item.texts.append(text)", "item.texts[:] = [text]")),
        ["tests/gateway/test_responses.py"],
    ),
    "to_count_is_to_generate": (change(translate, "counting", ('"tokenize": True', '"max_tokens": 1')), RESPONSE_TOOLS),
    # Conversations.
    "the_output_is_no_part_of_the_conversation": (
        change(core.Gateway, "add_to_conversation", ("(*asked.items, *writer.items())", "asked.items")),
        CONVERSATIONS,
    ),
    "a_deleted_conversation_comes_back": (
        change(
            core.Gateway,
            "add_to_conversation",
            ("if isinstance(found, Conversation):", "if True:"),
            ("found.with_items", "(found or Conversation(conversation_id, 0, {})).with_items"),
        ),
        CONVERSATIONS,
    ),
    "a_response_forgets_the_conversation_that_it_went_on_from": (
        change(core.Gateway, "before", ("found.parent, found.id", "None, found.id")),
        CONVERSATIONS,
    ),
    # Parties, keys, models.
    "a_key_may_name_what_there_is_not": (
        change(keys, "_parsed", ("served is not None and", "not served and")),
        KEYS,
    ),
    "a_length_that_is_not_known_stays_so": (
        change(core.Gateway, "_ask_model_len", ("return None", "return 0")),
        ADAPTERS,
    ),
    "alternatives_are_bare_bounds": (change(invalid, "_allowed", ("a number of \\\\g<0>", "\\\\g<0>")), ERRORS),
}
