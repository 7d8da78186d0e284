"""Planted bugs of the client, each one line of it changed, with the test that must notice it."""

from __future__ import annotations

from client import http_messages, messages
from client.grpc_transport import GrpcTransport
from client.history import History
from client.http_transport import HttpTransport
from tests.mutants.changes import Plant, change

CLI = "tests/client/test_cli.py::"
RAISED = "raise Unavailable(NO_END)"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "every_request_samples_alike": (
        change(messages.GenerateRequest, "with_seed", ("secrets.randbelow(MAX_FRESH_SEED)", "0")),
        [CLI + "test_what_samples_has_another_seed_each_time_that_is_told_and_can_be_given_again"],
    ),
    "count_of_zero_is_no_count": (
        change(messages, "_last", ("is not None", "")),
        ["tests/client/test_messages.py::test_a_count_of_zero_is_told_and_the_last_one_holds"],
    ),
    "stream_cut_short_is_a_whole_answer": (
        change(GrpcTransport, "stream", (RAISED, "return")),
        ["tests/client/test_transports.py::test_a_stream_that_ends_without_a_final_response_is_an_error"],
    ),
    "each_event_renews_the_deadline": (
        change(HttpTransport, "_events", ("remaining = deadline - time.monotonic()", "remaining = 10.0")),
        ["tests/client/test_transports.py::test_the_deadline_is_that_of_the_whole_stream"],
    ),
    "turn_that_adds_to_its_session_is_sent_twice": (
        change(messages.GenerateRequest, "repeatable", (" or self.session.full_history", " or True")),
        ["tests/client/test_retry.py::test_a_turn_that_would_be_added_twice_is_not_sent_again"],
    ),
    "failed_turn_keeps_old_turns_out": (
        change(History, "_finish", ("self.messages, self.left_out = self._before", "self.messages.pop()")),
        ["tests/client/test_conversation.py::test_a_turn_that_fits_nowhere_is_refused_and_no_old_turn_is_lost"],
    ),
    "a_proxys_502_is_no_reason_to_ask_again": (
        lambda set_attribute: set_attribute(http_messages, "_CODES", {**http_messages._CODES, 502: "INTERNAL"}),
        ["tests/client/test_http.py"],
    ),
}
