"""Exactly one answer, whatever happens between the executor and its engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from backend.api import EngineUnavailable, ErrorCode, EverbatchError, InvalidRequest, Request, Response
from backend.api.response import Result
from backend.core.messages import Cancel, Command, StopSession
from backend.executor import Executor, mailbox
from backend.executor.mailbox import Mailboxes
from tests.executor.helpers import ScriptedTransport

ENDED = Result([[1]], is_final=True)


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def executor(transport: ScriptedTransport) -> Executor:
    return Executor(transport)


def run_for(seconds: float, target: Callable[[], object]) -> bool:
    """Run something in a thread of its own; whether it came to its end in that time."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_request_that_is_answered_while_it_is_sent_raises_nothing_besides(
    executor: Executor, transport: ScriptedTransport
) -> None:
    def lose_it(command: Command) -> None:
        transport.lose()
        raise EngineUnavailable("the connection broke")

    transport.on_send = lose_it
    answers: list[Response] = []
    executor.submit(Request([1], 1), answers.append)
    assert [answer.error_code for answer in answers] == [ErrorCode.UNAVAILABLE]


@pytest.mark.parametrize("error", [EngineUnavailable, InvalidRequest])
def test_a_request_that_could_not_be_sent_raises_and_is_never_answered(
    executor: Executor, transport: ScriptedTransport, error: type[EverbatchError]
) -> None:
    def refuse(command: Command) -> None:
        raise error("it cannot be sent")

    transport.on_send = refuse
    answers: list[Response] = []
    with pytest.raises(error, match="cannot be sent"):
        executor.submit(Request([1], 1), answers.append)
    with pytest.raises(error, match="cannot be sent"):
        executor.enqueue_request(Request([1], 1))
    transport.lose()
    assert answers == [] and executor.await_responses(timeout=0.0) == []


def test_a_callback_may_use_the_executor(executor: Executor, transport: ScriptedTransport) -> None:
    heard = []

    def on_response(response: Response) -> None:
        executor.cancel_request(other)
        heard.append(response)

    other = executor.submit(Request([1], 1), heard.append)
    request_id = executor.submit(Request([1], 1), on_response)
    assert run_for(5, lambda: transport.answer(Response(request_id, result_or_none=ENDED))), "a deadlock"
    assert len(heard) == 1 and transport.sent[-1] == Cancel(other)


def test_an_engine_that_is_lost_while_a_request_is_registered_answers_it_in_its_mailbox(
    executor: Executor, transport: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mailbox must be there before anybody can put something into it."""
    open_mailbox, losing = Mailboxes.open, threading.Thread(target=transport.lose, daemon=True)

    def open_slowly(self: Mailboxes, request_id: int) -> None:
        losing.start()
        losing.join(0.1)  # it ends within this time if nothing holds it up
        open_mailbox(self, request_id)

    monkeypatch.setattr(Mailboxes, "open", open_slowly)
    request_id = executor.enqueue_request(Request([1], 1))
    losing.join(5)
    (answer,) = executor.await_responses(request_id, 5.0)
    assert answer.error_code is ErrorCode.UNAVAILABLE


def test_a_callback_that_raises_harms_no_other_request(
    executor: Executor, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(response: Response) -> None:
        raise RuntimeError("a mistake")

    answers: list[Response] = []
    first = executor.submit(Request([1], 1), fail)
    second = executor.submit(Request([1], 1), answers.append)
    transport.answer(Response(first, result_or_none=ENDED))
    transport.answer(Response(second, result_or_none=ENDED))
    assert [answer.request_id for answer in answers] == [second]
    assert f"the callback of request {first} failed" in caplog.text


def test_a_callback_that_raises_at_a_loss_harms_no_other_request(
    executor: Executor, transport: ScriptedTransport
) -> None:
    def fail(response: Response) -> None:
        raise RuntimeError("a mistake")

    answers: list[Response] = []
    executor.submit(Request([1], 1), fail)
    executor.submit(Request([1], 1), answers.append)
    transport.lose()
    assert len(answers) == 1


def test_shutdown_tells_a_waiter_of_the_loss_before_it_closes_the_mailboxes(executor: Executor) -> None:
    """A waiter that the closing wakes finds its one answer."""
    got: list[Response] = []
    executor.submit(Request([1], 1), lambda response: waiter.join(0.1))  # is told first, and takes its time
    request_id = executor.enqueue_request(Request([1], 1))
    waiter = threading.Thread(target=lambda: got.extend(executor.await_responses(request_id)), daemon=True)
    waiter.start()
    executor.shutdown()
    waiter.join(5)
    assert [response.error_code for response in got] == [ErrorCode.UNAVAILABLE]


def test_several_ids_are_awaited_within_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait that finds nothing takes all of its time, on a clock of the test's own."""
    clock, waits = [100.0], []

    def take(self: Mailboxes, request_id: int, timeout_s: float) -> list[Response]:
        waits.append(timeout_s)
        clock[0] += timeout_s
        return []

    monkeypatch.setattr(Mailboxes, "take", take)
    monkeypatch.setattr(mailbox.time, "monotonic", lambda: clock[0])
    assert Mailboxes().take_each([1, 2, 3], 5.0) == [[], [], []]
    assert waits == [5.0, 0.0, 0.0]


def test_a_session_is_stopped_under_its_namespace(executor: Executor, transport: ScriptedTransport) -> None:
    request_id = executor.stop_session(7, True, lambda response: None, namespace="tenant")
    assert transport.sent == [StopSession(request_id, 7, True, "tenant")]


def test_nothing_that_is_not_watched_goes_stale(executor: Executor) -> None:
    """An engine in this process has no heart: silence means nothing."""
    assert executor._watch is None and executor.is_ready() and not executor.has_given_up


@pytest.mark.feature("002-31")
def test_a_cancel_of_what_is_over_is_not_sent(executor: Executor, transport: ScriptedTransport) -> None:
    request_id = executor.submit(Request([1], 1), lambda response: None)
    transport.answer(Response(request_id, result_or_none=ENDED))
    num_sent = len(transport.sent)
    executor.cancel_request(request_id)
    assert len(transport.sent) == num_sent


def test_a_response_after_the_final_one_reaches_nobody(executor: Executor, transport: ScriptedTransport) -> None:
    answers: list[Response] = []
    request_id = executor.submit(Request([1], 1), answers.append)
    for _ in range(2):
        transport.answer(Response(request_id, result_or_none=ENDED))
    assert len(answers) == 1


def test_a_mailbox_is_closed_once_its_final_response_was_fetched(
    executor: Executor, transport: ScriptedTransport
) -> None:
    request_id = executor.enqueue_request(Request([1], 1))
    transport.answer(Response(request_id, result_or_none=ENDED))
    assert [response.result for response in executor.await_responses(request_id)] == [ENDED]
    (answer,) = executor.await_responses(request_id, 0.0)
    assert answer.error_code is ErrorCode.NOT_FOUND
