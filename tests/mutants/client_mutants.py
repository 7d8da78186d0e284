"""Planted bugs of the client, each one line of it changed, with the test that must notice it."""

from __future__ import annotations

from client import async_client, cli, client, errors, http_messages, messages, terminal
from client.grpc_transport import GrpcTransport
from client.history import History
from client.http_messages import FinalMark
from client.http_transport import HttpTransport
from client.statistics import AnswerClock
from tests.mutants.changes import Plant, change, change_everywhere

CLI = "tests/client/test_cli.py::"
RAISED = "raise Unavailable(NO_END)"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "every_request_samples_alike": (
        change(messages.GenerateRequest, "with_seed", ("secrets.randbelow(MAX_FRESH_SEED)", "0")),
        [CLI + "test_what_samples_has_another_seed_each_time_that_is_told_and_can_be_given_again"],
    ),
    "a_greedy_request_has_a_seed": (
        change(messages.GenerateRequest, "samples", ("self.temperature == 0 or ", "")),
        ["tests/client/test_messages.py::test_only_a_request_that_samples_gets_a_seed_of_its_own"],
    ),
    "the_server_of_the_checkout_is_not_asked": (
        change(cli.Server, "connect", ("url is None and", "False and")),
        [CLI + "test_without_an_address_the_server_of_the_checkout_is_asked_and_named"],
    ),
    "a_server_that_stops_is_called_absent": (
        change(cli.Server, "why_not", ("located.why_not()", "None")),
        [CLI + "test_a_server_that_stops_or_starts_is_not_called_absent"],
    ),
    "what_is_known_of_one_server_is_said_of_all": (
        change(cli.Server, "why_not", (" or url not in (located.grpc_url, located.http_url)", "")),
        [CLI + "test_a_server_that_stops_or_starts_is_not_called_absent"],
    ),
    "unknown_session_is_begun_for_ever": (
        change(History, "_pause_after", (" and self._known", "")),
        ["tests/client/test_conversation.py::test_a_session_that_cannot_be_begun_is_an_error_and_not_tried_for_ever"],
    ),
    "session_is_ended_in_the_clients_namespace": (
        change(History, "_end_request", ('namespace = self._options.get("namespace")', "namespace = None")),
        ["tests/client/test_conversation.py::test_a_namespace_among_the_options_holds_for_every_turn_and_for_the_end"],
    ),
    "count_of_zero_is_no_count": (
        change(messages, "_last", ("is not None", "")),
        ["tests/client/test_messages.py::test_a_count_of_zero_is_told_and_the_last_one_holds"],
    ),
    "stream_without_a_deadline": (
        change(GrpcTransport, "stream", (", timeout=timeout_s", "")),
        ["tests/client/test_transports.py::test_a_server_that_says_nothing_ends_with_the_deadline"],
    ),
    "stream_cut_short_is_a_whole_answer": (
        change(GrpcTransport, "stream", (RAISED, "return")),
        ["tests/client/test_transports.py::test_a_stream_that_ends_without_a_final_response_is_an_error"],
    ),
    "each_event_renews_the_deadline": (
        change(HttpTransport, "_events", ("remaining = deadline - time.monotonic()", "remaining = 10.0")),
        ["tests/client/test_transports.py::test_the_deadline_is_that_of_the_whole_stream"],
    ),
    "token_without_text_is_no_first_token": (
        change(AnswerClock, "add", ("(chunk.text or chunk.num_output_tokens)", "chunk.text")),
        ["tests/client/test_terminal.py::test_a_token_without_text_is_a_first_token"],
    ),
    "models_text_moves_the_cursor": (
        change(terminal, "write", ("printable(text) if sys.stdout.isatty() else text", "text")),
        ["tests/client/test_terminal.py::test_prompt_and_reply_are_cleaned_on_a_terminal"],
    ),
    "error_exits_with_success": (
        change(cli, "_run", ("status = 1", "status = 0")),
        ["tests/client/test_cli.py::test_an_error_is_one_sentence_and_the_exit_status_one"],
    ),
    "request_is_repeated_after_its_first_token": (
        change(client, "repeated", ("None if received else ", "")),
        ["tests/client/test_retry.py::test_nothing_is_sent_again_once_a_token_has_come"],
    ),
    "request_is_repeated_after_its_first_token_with_asyncio": (
        change(async_client, "repeated", ("None if received else ", "")),
        ["tests/client/test_retry.py::test_nothing_is_sent_again_once_a_token_has_come"],
    ),
    "turn_that_adds_to_its_session_is_sent_twice": (
        change(messages.GenerateRequest, "repeatable", (" or self.session.full_history", " or True")),
        ["tests/client/test_retry.py::test_a_turn_that_would_be_added_twice_is_not_sent_again"],
    ),
    "failed_turn_keeps_old_turns_out": (
        change(History, "_finish", ("self.messages, self.left_out = self._before", "self.messages.pop()")),
        ["tests/client/test_conversation.py::test_a_turn_that_fits_nowhere_is_refused_and_no_old_turn_is_lost"],
    ),
    "the_first_of_several_ends_is_the_last": (
        change(FinalMark, "push", ("self._num_ends == 0", "True")),
        ["tests/client/test_http.py::test_the_last_of_several_ends_is_the_final_one"],
    ),
    "each_attempt_has_all_of_the_time": (
        change(client, "repeated", ("deadline - time.monotonic() if attempt else timeout_s", "timeout_s")),
        ["tests/client/test_retry.py"],
    ),
    "each_attempt_has_all_of_the_time_with_asyncio": (
        change(async_client, "repeated", ("deadline - time.monotonic() if attempt else timeout_s", "timeout_s")),
        ["tests/client/test_retry.py"],
    ),
    "a_pause_may_outlast_the_deadline": (
        change(client, "repeated", ("time.monotonic() + again.pause_s >= deadline", "False")),
        ["tests/client/test_retry.py"],
    ),
    "a_server_that_is_stopped_has_no_such_model": (
        change_everywhere(
            errors.code_in, ('message.endswith(("has no available versions", "is not at ready state"))', "False")
        ),
        ["tests/client/test_http.py"],
    ),
    "a_proxys_502_is_no_reason_to_ask_again": (
        lambda set_attribute: set_attribute(http_messages, "_CODES", {**http_messages._CODES, 502: "INTERNAL"}),
        ["tests/client/test_http.py"],
    ),
}
