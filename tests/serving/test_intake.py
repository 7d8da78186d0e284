"""What ModelServer does with requests before the engine sees them: refusals, namespaces, text that takes its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from backend.api import EngineConfig, Overloaded, Request, Response, Result
from backend.api.config.schema import LimitsConfig, SchedulerConfig
from backend.serving.intake.requests import MAX_NAMESPACE, MAX_PARAMETERS, MAX_REQUEST_ID
from backend.serving.server import ModelServer
from tests.serving.conftest import QUICK
from tests.serving.fake_triton import InferenceRequest, ResponseSender
from tests.serving.helpers import bools, ints, streamed, token_inputs, uint64
from tests.serving.scripted import OnResponse, ScriptedExecutor, acquire

Answer = TypeVar("Answer")
NOT_UTF8 = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


class Hostile(InferenceRequest):
    """A request whose methods raise as Triton's do for bytes that are no UTF-8."""

    def __init__(self, **raising: Exception) -> None:
        super().__init__(token_inputs([[1]]))
        self._raising = raising

    def request_id(self) -> str:
        return self._answer("request_id", "")

    def parameters(self) -> str:
        return self._answer("parameters", "{}")

    def get_response_sender(self) -> ResponseSender:
        return self._answer("get_response_sender", self.sender)

    def _answer(self, method: str, otherwise: Answer) -> Answer:
        if method in self._raising:
            raise self._raising[method]
        return otherwise


def test_a_request_id_that_is_no_text_is_refused_and_execute_never_raises(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    bad, good = Hostile(request_id=NOT_UTF8), streamed([[1]])
    server.execute([bad, good])
    executor.end(1, 5)
    assert bad.sender.error() == "[INVALID_ARGUMENT] the request id is not valid UTF-8; encode it as UTF-8"
    assert good.sender.column("output_ids") == [5]


def test_a_request_without_a_sender_does_not_keep_the_next_from_being_served(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    good = streamed([[1]])
    server.execute([Hostile(get_response_sender=RuntimeError("closed")), good])
    executor.end(1, 5)
    assert good.sender.column("output_ids") == [5]


def test_parameters_that_are_no_text_are_refused(server: ModelServer) -> None:
    bad = Hostile(parameters=NOT_UTF8)
    server.execute([bad])
    assert bad.sender.error().startswith("[INVALID_ARGUMENT] the request's parameters are not valid UTF-8")


def test_a_request_id_may_have_as_many_characters_as_the_limit_says(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    longest, longer = (streamed([[1]], request_id="é" * n) for n in (MAX_REQUEST_ID, MAX_REQUEST_ID + 1))
    server.execute([longest, longer])
    executor.end(1, 5)
    assert longest.sender.column("output_ids") == [5]
    assert longer.sender.error() == (
        f"[INVALID_ARGUMENT] the request id has {MAX_REQUEST_ID + 1} characters, the limit is {MAX_REQUEST_ID}; "
        "use a shorter one"
    )


def test_a_request_id_that_is_too_long_is_not_logged(server: ModelServer, caplog: pytest.LogCaptureFixture) -> None:
    request = streamed([[1]], request_id="y" * 1_000_000)
    request.sender.failures = [RuntimeError("full")]  # a failure logs the id
    server.execute([request])
    request.sender.wait()
    assert caplog.records and max(len(record.getMessage()) for record in caplog.records) < 1000


def with_parameters(**parameters: object) -> InferenceRequest:
    return InferenceRequest(token_inputs([[1]]), "job", parameters=parameters)


def test_a_namespace_comes_under_either_name_and_reaches_the_engine(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    requests = [with_parameters(cache_salt="x"), with_parameters(namespace="x"), with_parameters()]
    requests.append(with_parameters(cache_salt="x", namespace="x"))
    server.execute(requests)
    assert [executor.requests[n].cache_salt for n in (1, 2, 3, 4)] == ["x", "x", "", "x"]
    for n, request in enumerate(requests):
        executor.end(n + 1)
        request.sender.wait()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cache_salt": "x", "namespace": "y"}, "cache_salt and namespace name the same thing and differ"),
        ({"namespace": 3}, "namespace is no string"),
        ({"namespace": "x" * (MAX_NAMESPACE + 1)}, "namespace has 257 characters, the limit is 256"),
        ({"cache_salt": "\ud800"}, "cache_salt holds a lone surrogate"),
        ({"anything": "x" * MAX_PARAMETERS}, f"the limit is {MAX_PARAMETERS}; send less"),
    ],
)
def test_parameters_beyond_their_limits_are_refused(
    server: ModelServer, executor: ScriptedExecutor, parameters: dict[str, int | str], message: str
) -> None:
    request = with_parameters(**parameters)
    server.execute([request])
    assert message in request.sender.error() and request.sender.error().startswith("[INVALID_ARGUMENT]")
    assert executor.requests == {}


def test_parameters_that_are_no_json_are_refused_rather_than_passed_over(
    server: ModelServer, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("{", "[]", '{"a": ' + "9" * 5000 + "}", "[" * 60_000):
        request = streamed([[1]])
        monkeypatch.setattr(request, "parameters", lambda text=text: text)
        server.execute([request])
        assert request.sender.error().startswith("[INVALID_ARGUMENT] the request's parameters")
    assert executor.requests == {}


def stop(namespace: str, request_id: str = "job") -> InferenceRequest:
    return InferenceRequest({"stop": bools(True)}, request_id, parameters={"namespace": namespace} if namespace else {})


def test_a_stop_request_finds_requests_of_its_own_namespace_only(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    ours, theirs = with_parameters(namespace="us"), with_parameters(namespace="them")
    server.execute([ours, theirs])
    for other in ("", "nobody"):
        request = stop(other)
        server.execute([request])
        assert request.sender.wait()[0].outputs() == {}
    assert executor.cancelled == []
    server.execute([stop("us")])
    ours.sender.wait()
    assert [n for n, _ in executor.cancelled] == [1]
    executor.end(2, 5)
    assert theirs.sender.column("output_ids") == [1, 5]


def test_a_stop_of_a_session_carries_the_namespace(server: ModelServer, executor: ScriptedExecutor) -> None:
    inputs = token_inputs([[1]], 0, CORRID=uint64(9), STOP=ints(1))
    request = InferenceRequest(inputs, parameters={"namespace": "us"})
    server.execute([request])
    request.sender.wait()
    assert executor.stopped_sessions == [(9, False, "us")]


# ---- an engine that cannot serve, or is full -------------------------------------------------------------------------


def test_while_the_engine_is_not_ready_newcomers_are_refused_at_once(
    server: ModelServer, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "is_ready", lambda: False)
    request = streamed([[1]])
    server.execute([request])
    assert request.sender.error() == "[UNAVAILABLE] no sign of life" and executor.requests == {}


def test_of_an_engine_that_was_given_up_clients_hear_what_the_executor_says(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    executor.has_given_up = True
    request = streamed([[1]])
    server.execute([request])
    assert request.sender.error() == "[UNAVAILABLE] the engine was given up" and not server.is_ready()


@pytest.mark.feature("000-62")
def test_what_the_engine_must_refuse_is_refused_without_asking_it(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_batch_size=2), limits=LimitsConfig(max_queue_size=1), triton=QUICK.triton
    )
    server = make_server(config=config)
    requests = [streamed([[n]]) for n in range(4)]
    server.execute(requests)
    assert len(executor.requests) == 3, "a batch and a full queue"
    assert requests[3].sender.error() == (
        "[UNAVAILABLE] Exceeds maximum queue size: Maximum queue size of 1 is reached (limits.max_queue_size); "
        "try again later"
    )
    executor.end(1)
    requests[0].sender.wait()
    executor.refuse = [Overloaded("Exceeds maximum queue size: 4 prompt tokens wait; try again later")]
    refused, accepted, beyond = streamed([[5]]), streamed([[6]]), streamed([[7]])
    server.execute([refused])  # the executor refuses it, so it does not count
    refused.sender.wait()
    server.execute([accepted, beyond])
    assert len(executor.requests) == 4 and "Maximum queue size of 1" in beyond.sender.error()
    for n, request in ((2, requests[1]), (3, requests[2]), (4, accepted)):
        executor.end(n)
        request.sender.wait()


def test_a_submit_that_answers_before_it_returns_is_a_whole_answer(
    server: ModelServer, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_at_once(asked: Request, on_response: OnResponse, resume: object) -> int:
        request_id = 7 + len(executor.requests)
        executor.requests[request_id] = asked
        result = Result([[asked.input_token_ids[0]]], is_final=True, is_sequence_final=True)
        on_response(Response(request_id, result_or_none=result))
        acquire(request.sender.entered)  # the sender has dealt with it before the next row is started
        return request_id

    monkeypatch.setattr(executor, "submit", answer_at_once)
    request = streamed([[1], [2], [3]])
    server.execute([request])
    assert sorted(request.sender.column("output_ids")) == [1, 2, 3], "no row ends the stream before the others began"
    assert request.sender.finals == [len(request.sender.sent) - 1]
