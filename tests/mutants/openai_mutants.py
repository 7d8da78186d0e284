"""Planted bugs of what the OpenAI endpoint does besides plain answers: scored prompts, functions in /v1/responses, parties."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.fronts import everbatch
from backend.serving.requests import Work
from backend.serving.sequence_output import SequenceOutput
from backend.text import chat
from backend.text.chat import ChatTemplate
from backend.text.token_texts import PromptTexts
from gateway import chunks, core, invalid, items, keys, logprobs, response_events, tools, translate
from gateway.store import Conversation
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
        change(logprobs, "_top", ("found.setdefault(one.token, one.logprob or 0.0)", "found[one.token] = one.logprob")),
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
    "the_prompt_is_told_with_each_response": (
        change(everbatch._OfPrompt, "once", ("self._untold.remove(sequence)", "pass")),
        EVERBATCH,
    ),
    "half_a_character_holds_the_prompt_back": (
        change(SequenceOutput, "is_due", ("self.prompt_log_probs is not None", "False")),
        EVERBATCH,
    ),
    "special_tokens_are_always_part_of_the_prompt_s_text": (
        change(PromptTexts, "push", ('name.encode() if is_held else b""', "name.encode()")),
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
    "template_variables_are_not_counted": (
        change(ChatTemplate, "_check", ("(messages, tools, further)", "(messages, tools)")),
        TEMPLATES,
    ),
    "a_continued_message_is_closed": (
        change(chat, "_up_to_final", ("return text[: start + len(kept)]", "return text")),
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
    "both_names_of_a_limit_count_as_one": (change(translate, "_limits", ("if len(given) == 2:", "if False:")), TAKEN),
    # Functions in /v1/responses.
    "calls_of_one_answer_are_answers_of_their_own": (
        change_everywhere(items.turns_of, ('if not turns or turns[-1]["role"] != "assistant":', "if True:")),
        RESPONSE_TOOLS,
    ),
    "white_space_between_calls_is_a_message": (
        change(response_events._Output, "add", ("self._blank.strip() or", "True or")),
        RESPONSE_TOOLS,
    ),
    "a_message_does_not_end_where_a_call_begins": (
        change(response_events.ResponseWriter, "events", ("if before is not None:", "if False:")),
        RESPONSE_TOOLS,
    ),
    "an_answer_of_nothing_has_no_message": (
        change(response_events._Output, "add", ("if is_last and not self.entries:", "if False:")),
        RESPONSE_TOOLS,
    ),
    "later_texts_of_a_message_replace_earlier_ones": (
        change(response_events._Output, "_grown", ("message.texts.append(text)", "message.texts[:] = [text]")),
        ["tests/gateway/test_responses.py"],
    ),
    "a_named_function_is_one_of_all": (
        change(tools, "_chosen", ("asked.named in (None, one.name)", "True")),
        RESPONSE_TOOLS,
    ),
    "the_page_begins_with_the_item_before": (
        change_everywhere(items.listed, ("ordered[place + 1 :]", "ordered[place:]")),
        RESPONSE_TOOLS,
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
            ("found.with_items", "(found or Conversation(conversation_id, 0, {}, ())).with_items"),
        ),
        CONVERSATIONS,
    ),
    "a_response_forgets_the_conversation_that_it_went_on_from": (
        change(core.Gateway, "before", ('Stored("", found.items, (), None, b"")', "None")),
        CONVERSATIONS,
    ),
    "a_conversation_s_items_count_for_nothing": (
        change(Conversation, "size", ("+ _size_of(self.items)", "")),
        CONVERSATIONS,
    ),
    # Parties, keys, models.
    "who_comes_through_a_proxy_is_of_this_machine": (
        change(core.Gateway, "is_of_this_machine", (" and not context.is_forwarded", "")),
        KEYS,
    ),
    "everybody_is_of_this_machine": (change(core.Gateway, "is_of_this_machine", ("self._is_private and ", "")), KEYS),
    "tenants_are_of_this_machine": (change(core.Gateway, "_party", ("self.keys is None and ", "")), KEYS),
    "a_key_may_name_what_there_is_not": (
        change(keys, "_parsed", ("served is not None and", "not served and")),
        KEYS,
    ),
    "the_length_of_the_model_is_asked_for_each_time": (
        change(core.Gateway, "max_model_len", ("self._model_len is None or", "True or")),
        ADAPTERS,
    ),
    "a_length_that_is_not_known_stays_so": (
        change(core.Gateway, "_ask_model_len", ("return None", "return 0")),
        ADAPTERS,
    ),
    "alternatives_are_bare_bounds": (change(invalid, "_allowed", ("a number of \\\\g<0>", "\\\\g<0>")), ERRORS),
}
