"""Planted bugs of the client, each one line of it changed."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from client import cli, messages, terminal
from client.conversation import Conversation
from client.grpc_transport import GrpcTransport
from client.http_transport import HttpTransport
from client.statistics import AnswerClock
from tests.mutants.catalogue import SetAttribute


def changed(function: Callable[..., Any], old: str, new: str) -> Any:
    """The function with one piece of its source replaced. Raises LookupError unless that piece is there once."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__qualname__} holds {old!r} {source.count(old)} times, once is expected")
    lazy = __future__.annotations.compiler_flag  # as every module here has it
    code = compile(source.replace(old, new), function.__qualname__, "exec", lazy)
    found: dict[str, Any] = {}
    exec(code, vars(sys.modules[function.__module__]), found)
    return found[function.__name__]


def unknown_session_is_begun_for_ever(set_attribute: SetAttribute) -> None:
    bug = changed(Conversation._send, "UNKNOWN_SESSION in str(error) and self._known", "UNKNOWN_SESSION in str(error)")
    set_attribute(Conversation, "_send", bug)


def session_is_ended_in_the_clients_namespace(set_attribute: SetAttribute) -> None:
    bug = changed(Conversation.end, 'namespace = self._options.get("namespace")', "namespace = None")
    set_attribute(Conversation, "end", bug)


def count_of_zero_is_no_count(set_attribute: SetAttribute) -> None:
    set_attribute(messages, "_last", changed(messages._last, "is not None", ""))


def stream_without_a_deadline(set_attribute: SetAttribute) -> None:
    set_attribute(GrpcTransport, "stream", changed(GrpcTransport.stream, "timeout=timeout_s, ", ""))


def stream_cut_short_is_a_whole_answer(set_attribute: SetAttribute) -> None:
    raised = 'raise ClientError("the server ended the stream without a final response", "UNAVAILABLE")'
    bug = changed(GrpcTransport.stream, raised, "return")
    set_attribute(GrpcTransport, "stream", bug)


def each_event_renews_the_deadline(set_attribute: SetAttribute) -> None:
    bug = changed(HttpTransport._events, "remaining = deadline - time.monotonic()", "remaining = timeout_s")
    set_attribute(HttpTransport, "_events", bug)


def token_without_text_is_no_first_token(set_attribute: SetAttribute) -> None:
    set_attribute(AnswerClock, "add", changed(AnswerClock.add, "(chunk.text or chunk.num_output_tokens)", "chunk.text"))


def models_text_moves_the_cursor(set_attribute: SetAttribute) -> None:
    bug = changed(terminal.write, "printable(text) if sys.stdout.isatty() else text", "text")
    set_attribute(terminal, "write", bug)


def error_exits_with_success(set_attribute: SetAttribute) -> None:
    set_attribute(cli, "_run", changed(cli._run, "status = 1", "status = 0"))


MUTANTS = {
    "unknown_session_is_begun_for_ever": (
        unknown_session_is_begun_for_ever,
        ["tests/client/test_conversation.py::test_a_session_that_cannot_be_begun_is_an_error_and_not_tried_for_ever"],
    ),
    "session_is_ended_in_the_clients_namespace": (
        session_is_ended_in_the_clients_namespace,
        ["tests/client/test_conversation.py::test_a_namespace_among_the_options_holds_for_every_turn_and_for_the_end"],
    ),
    "count_of_zero_is_no_count": (
        count_of_zero_is_no_count,
        ["tests/client/test_messages.py::test_a_count_of_zero_is_told_and_the_last_one_holds"],
    ),
    "stream_without_a_deadline": (
        stream_without_a_deadline,
        ["tests/client/test_transports.py::test_a_server_that_says_nothing_ends_with_the_deadline"],
    ),
    "stream_cut_short_is_a_whole_answer": (
        stream_cut_short_is_a_whole_answer,
        ["tests/client/test_transports.py::test_a_stream_that_ends_without_a_final_response_is_an_error"],
    ),
    "each_event_renews_the_deadline": (
        each_event_renews_the_deadline,
        ["tests/client/test_transports.py::test_the_deadline_is_that_of_the_whole_stream"],
    ),
    "token_without_text_is_no_first_token": (
        token_without_text_is_no_first_token,
        ["tests/client/test_terminal.py::test_a_token_without_text_is_a_first_token"],
    ),
    "models_text_moves_the_cursor": (
        models_text_moves_the_cursor,
        ["tests/client/test_terminal.py::test_prompt_and_reply_are_cleaned_on_a_terminal"],
    ),
    "error_exits_with_success": (
        error_exits_with_success,
        ["tests/client/test_cli.py::test_an_error_is_one_sentence_and_the_exit_status_one"],
    ),
}
