"""Planted bugs of the OpenAI endpoint's scored prompts, functions, parties and choices, and of Anthropic's Messages API."""

from __future__ import annotations

from backend.serving.wires import everbatch, vllm
from backend.serving.wires.named_sampling import NamedSampling
from backend.serving.work import Work
from backend.text.chat import ChatTemplate
from gateway import (
    anthropic_turns,
    chunks,
    core,
    invalid,
    keys,
    logprobs,
    middleware,
    response_output,
    translate,
    triton_client,
)
from gateway.answers import Running
from gateway.anthropic_answers import MessageWriter
from gateway.chunks import Chunks, _Ids
from gateway.triton_client import Piece
from tests.mutants.changes import change, change_everywhere
from tests.serving import conftest  # noqa: F401

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

FRONTS = ["tests/serving/test_choices.py"]
CHAT = ["tests/gateway/test_chat.py"]

ANSWERS = ["tests/gateway/test_anthropic.py"]
MESSAGES_ERRORS = ["tests/gateway/test_anthropic_errors.py"]
IDS = ["tests/gateway/test_token_ids.py"]
SESSION = ["tests/gateway/test_agent_session.py"]

MUTANTS = {
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
        change(core.Gateway, "_ask_facts", ("return None", "return Facts(0, False)")),
        ADAPTERS,
    ),
    "alternatives_are_bare_bounds": (change(invalid, "_allowed", ("a number of \\\\g<0>", "\\\\g<0>")), ERRORS),
    "the_best_keep_their_numbers": (
        change(everbatch, "chosen", ("[delta._replace(sequence=place) for place, delta in enumerate(best)]", "best")),
        FRONTS,
    ),
    "vllm_s_sequences_answer_one_by_one": (
        change(vllm, "choices_output", ("if joint and", "if not joint and")),
        FRONTS,
    ),
    "beams_stop_early": (
        change(NamedSampling, "sampling_config", ("_EARLY_STOPPING[self.early_stopping]", "1")),
        FRONTS,
    ),
    "only_the_first_cancelled_sequence_counts": (
        change(
            vllm, "renderer", ("for one in deltas):\n            raise", "for one in deltas[:1]):\n            raise")
        ),
        FRONTS,
    ),
    "the_first_end_is_that_of_all_replies": (
        change(triton_client.TritonLink, "stream", ("while open_choices:", "while open_choices == job.choices:")),
        CHAT,
    ),
    "only_the_first_element_is_read": (change(triton_client, "_pieces", ("data = data[end:]", "break")), CHAT),
    "every_prompt_was_written_to_the_cache": (
        change(MessageWriter, "__init__", ("wants_caching(message)", "True")),
        ANSWERS,
    ),
    "white_space_at_the_end_is_lost": (
        change(MessageWriter, "take", ("and self._blank and", "and False and")),
        ANSWERS,
    ),
    "what_differs_from_request_to_request_is_shown_first": (
        change(anthropic_turns, "_system", ("one.text.startswith(ACCOUNTS)", "False")),
        SESSION,
    ),
    "only_one_header_has_keys": (
        change(middleware, "_client", ('headers.get("x-api-key", "").strip()', '""')),
        MESSAGES_ERRORS,
    ),
    "a_client_s_share_is_the_server_s": (
        change(Running, "enter", ("too_many_of_one(", "overloaded(")),
        MESSAGES_ERRORS,
    ),
    "the_prompt_is_told_with_each_event": (change(_Ids, "fields", ("prompt, self._prompt = b", "prompt, _ = b")), IDS),
    "the_ids_of_one_choice_are_those_of_all": (change(Chunks, "of", ("self._ids[index]", "self._ids[0]")), IDS),
    "only_the_first_sequence_is_told_of_the_prompt": (
        change(everbatch, "renderer", ("untold.remove(delta.sequence)", "untold.clear()")),
        EVERBATCH,
    ),
}
