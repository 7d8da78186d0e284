"""The Executor's contract: ids, awaiting, cancelling, the end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from backend.api import EngineUnavailable, ErrorCode, FinishReason, OutputConfig, Request, Response, SamplingConfig
from backend.executor.executor import Executor
from tests.executor.helpers import CONFIG, assert_processed, drain, make_executor, tokens_of
from tests.fakes.hash_worker import HashWorkerGroup, oracle


@pytest.fixture
def executor() -> Iterator[Executor]:
    with make_executor() as executor:
        yield executor


def streaming(prompt: list[int], max_tokens: int, **fields: object) -> Request:
    return Request(prompt, max_tokens, streaming=True, **fields)


@pytest.mark.feature("000-03")
def test_enqueue_returns_distinct_ids_and_raises_after_shutdown() -> None:
    executor = make_executor()
    ids = [executor.enqueue_request(streaming([1, 2, 3], 3)) for _ in range(20)]
    assert len(set(ids)) == 20
    assert executor.can_enqueue_requests()
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    with pytest.raises(EngineUnavailable, match="shut down"):
        executor.enqueue_request(streaming([1], 1))


@pytest.mark.feature("000-04", "000-27")
def test_enqueue_requests_gives_ids_in_the_order_of_the_requests(executor: Executor) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    ids = executor.enqueue_requests([streaming(prompt, 6) for prompt in prompts])
    got = drain(executor, ids)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(got[request_id]) == oracle(prompt, 6, 1000)


@pytest.mark.feature("000-05")
def test_awaiting_an_idle_executor_gives_an_empty_list_at_the_timeout(executor: Executor) -> None:
    assert executor.await_responses(timedelta(milliseconds=10)) == []


@pytest.mark.feature("000-05")
def test_mixed_requests_are_drained_by_polling(executor: Executor) -> None:
    requests = [streaming([i + 1], 1 + i % 5) if i % 2 else Request([i + 1], 1 + i % 5) for i in range(20)]
    got = drain(executor, executor.enqueue_requests(requests))
    assert [len(responses) for responses in got.values()] == [1 + i % 5 if i % 2 else 1 for i in range(20)]


@pytest.mark.feature("000-06")
def test_awaiting_ids_gives_a_list_for_each_and_one_error_once_an_id_is_done(executor: Executor) -> None:
    ids = executor.enqueue_requests([streaming([5, 6], 3), streaming([7, 8], 4)])
    got: dict[int, list[int]] = {i: [] for i in ids}
    done: set[int] = set()
    while len(done) < 2:
        for request_id, responses in zip(ids, executor.await_responses(ids, 5.0), strict=True):
            for response in responses:
                if response.has_error():
                    assert request_id in done
                    assert response.error_msg == f"ReqId {request_id} has already been processed and was terminated."
                else:
                    got[request_id] += response.result.output_token_ids[0]
                    done |= {request_id} if response.is_final else set()
    assert list(got.values()) == [oracle([5, 6], 3, 1000), oracle([7, 8], 4, 1000)]


@pytest.mark.feature("000-06")
def test_awaiting_a_consumed_id_gives_one_error_however_it_is_asked_for(executor: Executor) -> None:
    request_id, other = executor.enqueue_requests([Request([5, 6], 3), Request([7], 2)])
    drain(executor, [request_id, other])
    assert_processed(executor, request_id)
    assert executor.await_responses([request_id, other], 5.0)[1][0].request_id == other
    assert executor.await_responses(timedelta(milliseconds=1)) == [], "it does not come up among those of any request"


@pytest.mark.feature("000-07", "000-24")
def test_cancelling_gives_one_final_response_and_frees_the_blocks() -> None:
    executor = make_executor()
    request_id = executor.enqueue_request(streaming([1, 2, 3], 200))
    first = executor.await_responses(request_id, 5.0)
    assert not first[-1].is_final
    executor.cancel_request(request_id)
    responses = drain(executor, [request_id])[request_id]
    assert [response.is_final for response in responses].count(True) == 1
    assert responses[-1].result.finish_reasons == (FinishReason.CANCELLED,)
    assert len(tokens_of(first + responses)) < 200
    core = executor._transport._core
    executor.shutdown()
    assert core.kv.stats().used_num_blocks == 0


@pytest.mark.feature("000-12")
def test_streaming_gives_a_response_per_token_and_otherwise_there_is_one(executor: Executor) -> None:
    ids = executor.enqueue_requests([streaming([1], 9), Request([1], 9)])
    got = drain(executor, ids)
    assert [len(got[i]) for i in ids] == [9, 1]


@pytest.mark.feature("000-13")
def test_unset_sampling_fields_read_as_none() -> None:
    config = SamplingConfig()
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    assert fields.pop("beam_width") == 1
    assert set(fields.values()) == {None}


@pytest.mark.feature("000-17")
def test_the_client_id_comes_back_on_every_response(executor: Executor) -> None:
    ids = executor.enqueue_requests([streaming([1], 2, client_id=123), streaming([2], 2, client_id=123)])
    got = drain(executor, ids)
    assert {response.client_id for responses in got.values() for response in responses} == {123}


def test_log_probs_are_none_unless_asked_for(executor: Executor) -> None:
    asked = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    plain, wanted = executor.enqueue_requests([Request([1], 3), Request([1], 3, output_config=asked)])
    got = drain(executor, [plain, wanted])
    assert got[plain][0].result.log_probs is None
    result = got[wanted][0].result
    assert result.log_probs == [[float(token) for token in result.output_token_ids[0]]]


def test_a_callback_hears_of_every_response_in_order(executor: Executor) -> None:
    heard, done = [], threading.Event()

    def on_response(response: Response) -> None:
        heard.append(response)
        if response.is_final:
            done.set()

    executor.submit(streaming([9, 9], 7), on_response)
    assert done.wait(5)
    assert tokens_of(heard) == oracle([9, 9], 7, 1000)


@pytest.mark.feature("002-32")
def test_shutdown_wakes_a_waiter_and_answers_live_requests() -> None:
    workers = HashWorkerGroup()
    submit = workers.submit
    workers.submit = lambda step: (time.sleep(0.005), submit(step))[1]  # the request would take a second
    executor = Executor.in_process(CONFIG, workers)
    request_id = executor.enqueue_request(Request([1, 2, 3], 200))
    got = []
    waiter = threading.Thread(target=lambda: got.extend(executor.await_responses(request_id)))
    waiter.start()
    executor.shutdown()
    waiter.join(5)
    assert not waiter.is_alive()
    assert [response.error_code for response in got] == [ErrorCode.UNAVAILABLE]
    executor.shutdown()
    assert len(got) == 1, "a second one changes nothing"


@pytest.mark.feature("002-32")
def test_a_program_that_ends_without_a_shutdown_does_not_hang() -> None:
    program = (
        "from backend.api import Request\n"
        "from tests.executor.helpers import make_executor\n"
        "executor = make_executor()\n"
        "executor.enqueue_request(Request([1, 2, 3], 200))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


@pytest.mark.feature("002-17")
def test_nothing_remains_of_ten_thousand_requests(executor: Executor) -> None:
    for first in range(0, 10_000, 1000):
        ids = executor.enqueue_requests([Request([(first + i) % 1000], 1) for i in range(1000)])
        drain(executor, ids)
    assert executor._replay.ids() == [] and executor._mailboxes._boxes == {}
    assert executor._transport._core.num_live == 0


@pytest.mark.feature("004-17")
def test_the_stream_callback_is_called_once_per_token(executor: Executor) -> None:
    calls, done = [], threading.Event()
    executor.submit(streaming([3], 5), lambda response: (calls.append(response), response.is_final and done.set()))
    assert done.wait(5)
    assert [len(response.result.output_token_ids[0]) for response in calls] == [1] * 5


def test_a_deadline_ends_a_request_that_still_runs() -> None:
    with make_executor() as executor:
        request_id = executor.enqueue_request(Request([1, 2], 250, timeout_s=0.001))
        time.sleep(0.002)  # the deadline itself, not a synchronisation
        result = drain(executor, [request_id])[request_id][-1].result
        assert result.finish_reasons == (FinishReason.TIMED_OUT,)


class EndOfTheThread(BaseException):
    """Passes every handler of exceptions."""


def test_when_the_engine_thread_ends_requests_posted_meanwhile_are_answered_and_later_ones_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = HashWorkerGroup()
    executor = Executor.in_process(CONFIG, workers)
    told: list[Response] = []
    transport = executor._transport
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def fail(step: object) -> None:
        executor.submit(Request([7], 4), told.append)  # while the loop ends nobody reads this
        raise EndOfTheThread

    monkeypatch.setattr(workers, "submit", fail)
    first = executor.enqueue_request(Request([1], 4))
    assert executor.await_responses(first, 10)[0].error_code is ErrorCode.UNAVAILABLE
    transport._thread.join(10)
    assert [response.error_msg for response in told] == ["the engine has stopped; make a new Executor or LLM"]
    with pytest.raises(EngineUnavailable, match="the engine has stopped; make a new Executor or LLM"):
        executor.enqueue_request(Request([1], 4))
    executor.shutdown()


def test_a_struct_given_as_a_dict_is_read_as_the_decoder_of_a_socket_reads_it(executor: Executor) -> None:
    request_id = executor.enqueue_request(Request([1], 4, sampling_config={"min_tokens": 2}, output_config={}))
    responses = drain(executor, [request_id])[request_id]
    assert tokens_of(responses) == [1, *oracle([1], 4, 1000)]
