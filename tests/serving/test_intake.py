"""What ModelServer does with requests before the engine sees them: refusals, namespaces, text that takes its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from backend.api import EngineConfig, Overloaded, Request, Response, Result
from backend.api.config import LimitsConfig, SchedulerConfig, TritonConfig
from backend.core.step import ModelInfo
from backend.serving.model_server import ModelServer
from backend.serving.requests import MAX_NAMESPACE, MAX_PARAMETERS, MAX_REQUEST_ID, Work
from backend.serving.tensors import ENSEMBLE
from backend.serving.text_requests import TextTools, check_text_requests, parse_text_requests
from tests.serving.conftest import QUICK
from tests.serving.fake_triton import InferenceRequest, ResponseSender
from tests.serving.helpers import bools, ints, streamed, strings, token_inputs, uint64
from tests.serving.scripted import OnResponse, ScriptedExecutor

MODEL_DIRECTORY = Path(__file__).resolve().parents[2] / "models" / "default"
Answer = TypeVar("Answer")
NOT_UTF8 = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def acquire(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=20)


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
    def answer_at_once(asked: Request, on_response: OnResponse) -> int:
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


# ---- text ------------------------------------------------------------------------------------------------------------


class SlowFront:
    """Reading text takes as long as the test says."""

    def __init__(self) -> None:
        self.tools = TextTools.from_directory(str(MODEL_DIRECTORY))
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.threads: set[str] = set()

    def parse(self, *arguments: Any) -> list[Work]:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.may_end.wait(20)
        return parse_text_requests(*arguments, self.tools)


@pytest.fixture
def front() -> SlowFront:
    return SlowFront()


@pytest.fixture
def make_text_server(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> Iterator[Callable[..., ModelServer]]:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)

    def make(config: EngineConfig = QUICK, **options: Any) -> ModelServer:
        return make_server(ENSEMBLE, front.parse, config, check_text=check_text_requests, **options)

    yield make
    front.may_end.set()


def ask(text: str = "a", request_id: str = "", **extra: np.ndarray) -> InferenceRequest:
    return InferenceRequest({"text_input": strings(text), "max_tokens": ints(4), **extra}, request_id)


def test_text_is_read_on_its_own_threads_and_its_inputs_are_kept(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask("abc", seed=uint64(7))
    server.execute([request])  # returns while the text is being read
    acquire(front.begun)
    for tensor in request.inputs():
        tensor.as_numpy()[:] = 0  # Triton may take its memory back like this
    front.may_end.set()
    acquire(executor.submitted)
    sent = executor.requests[1]
    assert sent.input_token_ids == front.tools.tokenizer.encode("abc") and sent.sampling_config.seed == 7
    assert front.threads == {"everbatch-text"}
    executor.end(1, 50)
    request.sender.wait()


def test_no_text_is_read_for_an_engine_that_is_not_ready(
    make_text_server: Callable[..., ModelServer],
    executor: ScriptedExecutor,
    front: SlowFront,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make_text_server()
    monkeypatch.setattr(executor, "is_ready", lambda: False)
    request = ask()
    server.execute([request])
    assert request.sender.error() == "[UNAVAILABLE] the engine is not ready yet; try again in a few seconds"
    assert front.threads == set()


def test_turns_of_one_session_reach_the_engine_in_the_order_they_came(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    turns = [ask(f"turn {n}", CORRID=uint64(5), START=ints(int(n == 0)), END=ints(0)) for n in range(6)]
    server.execute(turns)
    acquire(front.begun)
    assert not front.begun.acquire(timeout=0.05), "one at a time"
    front.may_end.set()
    for _ in turns:
        acquire(executor.submitted)
    encode = front.tools.tokenizer.encode
    expected = [encode(f"turn {n}", add_special_tokens=n == 0) for n in range(6)]
    assert [executor.requests[n + 1].input_token_ids for n in range(6)] == expected
    for n, turn in enumerate(turns):
        executor.end(n + 1)
        turn.sender.wait()


def test_a_stop_request_ends_one_whose_text_is_still_being_read(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask(request_id="job")
    server.execute([request])
    acquire(front.begun)
    answer = InferenceRequest({"max_tokens": ints(0), "stop": bools(True)}, request_id="job")
    server.execute([answer])
    assert answer.sender.wait()[0].outputs() == {}
    assert request.sender.error() == "[CANCELLED] the request was cancelled before its text had been read"
    front.may_end.set()
    server._text.close()
    assert executor.requests == {}, "it never reaches the engine"


def test_a_client_that_leaves_while_its_text_is_read_reaches_no_engine(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask()
    server.execute([request])
    acquire(front.begun)
    request.sender.client_gone = True
    assert request.sender.error().startswith("[CANCELLED]")
    front.may_end.set()
    server._text.close()
    assert executor.requests == {}


def test_the_end_of_a_drain_ends_requests_whose_text_is_being_read(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server(drain_grace_s=0.0)
    request = ask()
    server.execute([request])
    acquire(front.begun)
    server._drain()
    assert request.sender.error().startswith("[UNAVAILABLE] the server is shutting down")
    front.may_end.set()
    server._text.close()
    assert executor.requests == {}


def test_a_request_whose_text_takes_too_long_is_refused_by_the_housekeeper(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server(EngineConfig(triton=TritonConfig(text_threads=1, text_timeout_s=0.05)))
    stuck = ask()
    server.execute([stuck])
    assert "took longer than 0.05 s (triton.text_timeout_s)" in stuck.sender.error()
    front.may_end.set()
    served = ask()
    server.execute([served])
    acquire(executor.submitted)
    executor.end(1, 50)
    assert len(served.sender.wait()) == 1 and len(executor.requests) == 1


def test_text_beyond_its_limit_is_refused_without_a_text_thread(
    make_text_server: Callable[..., ModelServer], front: SlowFront
) -> None:
    server = make_text_server()
    requests = {
        "embedding_bias_words has 65537 bytes, the limit is 65536 (limits.max_bias_bytes)": ask(
            embedding_bias_words=strings("w" * 65_537)
        ),
        "stop_words has 4097 bytes, the limit is 4096 (limits.max_word_bytes)": ask(stop_words=strings("w" * 4097)),
        "bad_words has 4098 bytes, the limit is 4096 (limits.max_word_bytes)": ask(bad_words=strings(["é" * 2049])),
        "text_input has 16385 bytes, the limit is 16384": ask("x" * 16_385),
    }
    server.execute(list(requests.values()))
    for message, request in requests.items():
        assert message in request.sender.error()
    assert front.threads == set()
