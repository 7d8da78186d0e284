"""Planted bugs of the OpenAI endpoint, and of the fronts that it and its kin speak through."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.api import sampling
from backend.serving.wires import everbatch, named_sampling, trtllm_fields, trtllm_inputs, trtllm_outputs
from backend.text.chat import ChatTemplate
from gateway import (
    adapters,
    choices,
    chunks,
    connection,
    errors,
    logprobs,
    middleware,
    response_events,
    tools,
    translate,
)
from gateway.answers import Answer
from gateway.keys import Keys, Right
from gateway.store import ResponseStore
from tests.mutants.changes import Plant, SetAttribute, change, change_everywhere

COMPLETIONS = ["tests/gateway/test_completions.py"]
CONNECTIONS = ["tests/gateway/test_connections.py"]
ERRORS = ["tests/gateway/test_errors.py"]
FORMS = ["tests/gateway/test_forms.py"]
FRONTS = [
    "tests/serving/test_outputs.py",
    "tests/serving/test_token_requests.py",
    "tests/serving/test_trtllm_inputs.py",
]
KEYS = ["tests/gateway/test_keys.py"]
LIMITS = ["tests/gateway/test_limits.py"]
PARAMETERS = ["tests/gateway/test_parameters.py"]
PLACES = ["tests/gateway/test_places.py"]
RESPONSES = ["tests/gateway/test_responses.py"]
TURNS = ["tests/gateway/test_turns.py"]


def entry(owner: object, table: str, name: str, value: object) -> Plant:
    """A table with one entry that is wrong."""

    def plant(set_attribute: SetAttribute) -> None:
        assert name in getattr(owner, table)
        set_attribute(owner, table, {**getattr(owner, table), name: value})

    return plant


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    # Large replies.
    "a_slice_loses_its_last_token": (
        change(logprobs, "encoded", ("tokens[start : start + SLICE]", "tokens[start : start + SLICE - 1]")),
        TURNS,
    ),
    "characters_do_not_span_tokens": (
        change(
            logprobs.TextColumns,
            "__call__",
            ("self._decoder.decode(bytes(", 'str(encoding="utf-8", errors="replace", object=bytes('),
        ),
        TURNS,
    ),
    "later_texts_replace_earlier_ones": (
        change(choices.Reply, "add", ("self._texts.append(piece.text)", "self._texts = [piece.text]")),
        TURNS,
    ),
    "offsets_go_on_from_choice_to_choice": (
        change(chunks.CompletionChunks, "_part", ("self._logprobs[index]", "self._logprobs[0]")),
        COMPLETIONS,
    ),
    "choices_share_one_reader_of_calls": (
        change(chunks.ChatChunks, "_body", ("self._readers[index]", "self._readers[0]")),
        TURNS,
    ),
    "usage_is_that_of_the_last_choice": (
        change(chunks.Chunks, "of", ("self._usages[index] =", "self._usages[0] =")),
        TURNS,
    ),
    "every_prompt_counts_as_the_first": (
        change(choices, "total_usage", ("choices[0].prompt_tokens for choices", "usages[0].prompt_tokens for choices")),
        TURNS,
    ),
    # Connections and places.
    "failed_requests_keep_their_places": (
        change(middleware.Middleware, "__call__", ("with context.at_end:", "if True:")),
        CONNECTIONS,
    ),
    "a_reply_of_many_gives_one_place_back": (
        change(Answer, "__call__", ("leave, context.namespace, self._choices)", "leave, context.namespace, 1)")),
        LIMITS,
    ),
    "replies_are_all_strangers": (
        change(
            Answer, "__call__", ("enter(context.namespace,", 'enter("",'), ("leave, context.namespace,", 'leave, "",')
        ),
        PLACES,
    ),
    "a_connection_that_is_closing_makes_room": (
        change(connection.Connection, "_make_room", ("if not other.transport.is_closing()", "if True")),
        CONNECTIONS,
    ),
    # Keys, models, the store.
    "each_key_may_read_the_metrics": (
        change(Keys, "client_of", ("found = client", "found = Client(client.name, client.models, metrics=True)")),
        KEYS,
    ),
    "each_key_may_change_adapters": (
        change(Right, "is_of", ('"adapters": client.adapters', '"adapters": True')),
        ["tests/gateway/test_adapters.py"],
    ),
    "loaded_adapters_cannot_be_named": (
        change(adapters, "_change", ("served.adapters = tuple", "tuple")),
        ["tests/gateway/test_adapters.py"],
    ),
    "one_namespace_has_the_responses_of_all": (
        change(ResponseStore, "put", ("self._shelves.setdefault(namespace,", 'self._shelves.setdefault("",')),
        KEYS,
    ),
    "what_is_not_found_is_a_bad_request": (entry(errors, "_STATUS_OF_CODE", "NOT_FOUND", 400), ERRORS),
    "what_is_exhausted_is_unavailable": (entry(errors, "_STATUS_OF_CODE", "RESOURCE_EXHAUSTED", 503), ERRORS),
    "a_precondition_is_a_failure": (entry(errors, "_STATUS_OF_CODE", "FAILED_PRECONDITION", 500), ERRORS),
    "beams_are_called_best_of": (entry(errors, "_PARAMETERS", "beam_width", "best_of"), ERRORS),
    "penalties_are_exchanged": (
        change(
            translate,
            "sampling",
            (
                "for name in _SAME_NAME if",
                'for name in _SAME_NAME for other in ["presence_penalty" if name == "frequency_penalty" else name] if',
            ),
            ("getattr(message, name)", "getattr(message, other)"),
        ),
        PARAMETERS,
    ),
    "cached_tokens_are_the_output_s": (
        change(
            response_events,
            "_usage",
            ('"cached_tokens": usage.cached_tokens', '"cached_tokens": usage.completion_tokens'),
        ),
        RESPONSES,
    ),
    "a_response_shows_another_top_p": (
        change(response_events.ResponseWriter, "body", ('"top_p": message.top_p', '"top_p": message.temperature')),
        RESPONSES,
    ),
    "the_first_tool_is_meant": (
        change(tools.Toolset, "callable", ("one.name in self.named", "i == 0")),
        FORMS,
    ),
    # The fronts.
    "tools_are_not_counted": (
        change(ChatTemplate, "_check", ("(tools, MAX_TOOL_DEPTH", "(None, MAX_TOOL_DEPTH")),
        ["tests/text/test_text_chat.py"],
    ),
    "the_first_token_s_time_is_the_last_s": (
        change(trtllm_outputs, "_perf_arrays", ("perf.first_token_ns", "perf.last_token_ns")),
        FRONTS,
    ),
    "reused_blocks_are_the_new_ones": (
        change(
            trtllm_outputs,
            "_perf_arrays",
            ('reused_blocks", perf.num_reused_blocks', 'reused_blocks", perf.num_new_blocks'),
        ),
        FRONTS,
    ),
    "a_batch_of_rows_has_one_number": (
        change_everywhere(trtllm_fields.read_settings, ("batch_index=row if", "batch_index=0 if")),
        ["tests/serving/test_model_server.py"],
    ),
    "a_range_keeps_the_first_one_s_time": (
        change(
            trtllm_inputs, "_read_ranges", ("_seconds(duration))", "_seconds(durations[0] if durations else duration))")
        ),
        ["tests/serving/test_trtllm_inputs.py"],
    ),
    "an_unset_reset_id_is_taken": (
        entry(sampling, "_UNSET", "top_p_reset_ids", -2),
        ["tests/serving/test_trtllm_inputs.py"],
    ),
    "sequences_share_the_text_of_tokens": (
        change(everbatch, "renderer", ("texts[delta.sequence]", "texts[0]")),
        ["tests/serving/test_everbatch_model.py", "tests/serving/test_choices.py"],
    ),
    "own_ends_are_ignored_with_others": (
        change(
            named_sampling.NamedSampling, "end_ids", ("if self.ignore_eos", "if self.ignore_eos or self.stop_token_ids")
        ),
        ["tests/serving/test_everbatch_model.py"],
    ),
}
