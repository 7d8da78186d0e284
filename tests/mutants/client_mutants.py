"""Planted bugs of the client, each one line of it changed, with the test that must notice it."""

from __future__ import annotations

from client import cli, errors, http_messages, messages
from client.grpc_transport import GrpcTransport
from client.history import History
from client.http_transport import HttpTransport
from tests.mutants.changes import Plant, change, change_everywhere

CLI = "tests/client/test_cli.py::"
RAISED = "raise Unavailable(NO_END)"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "every_request_samples_alike": (
        change(messages.GenerateRequest, "with_seed", ("secrets.randbelow(MAX_FRESH_SEED)", "0")),
        [CLI + "test_what_samples_has_another_seed_each_time_that_is_told_and_can_be_given_again"],
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
    "error_exits_with_success": (
        change(cli, "_run", ("status = 1", "status = 0")),
        ["tests/client/test_cli.py::test_an_error_is_one_sentence_and_the_exit_status_one"],
    ),
    "turn_that_adds_to_its_session_is_sent_twice": (
        change(messages.GenerateRequest, "repeatable", (" or self.session.full_history", " or True")),
        ["tests/client/test_retry.py::test_a_turn_that_would_be_added_twice_is_not_sent_again"],
    ),
    "failed_turn_keeps_old_turns_out": (
        change(History, "_finish", ("self.messages, self.left_out = self._before", "self.messages.pop()")),
        ["tests/client/test_conversation.py::test_a_turn_that_fits_nowhere_is_refused_and_no_old_turn_is_lost"],
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
