"""ModelServer over a scripted executor: what a client of the Triton models sees."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Never

import numpy as np
import pytest

from backend.api import EngineCounters, EngineStats, FinishReason, IterationStats, Overloaded, RequestId
from backend.serving.assembly import is_decoupled
from backend.serving.lifecycle import housekeeper
from backend.serving.lifecycle.housekeeper import Housekeeper
from backend.serving.server import ModelServer
from tests.serving.fake_triton import InferenceRequest, MetricFamily
from tests.serving.helpers import bools, ints, streamed, token_inputs, token_request, uint64
from tests.serving.scripted import ScriptedExecutor


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def wait_for(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=10)


@pytest.mark.feature("001-57")
def test_a_streaming_request_gets_its_tokens_and_a_unary_one_a_single_response(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    stream, unary = streamed([[1, 2]]), token_request([[1, 2]])
    assert server.execute([stream, unary]) is None
    for request_id in (1, 2):
        executor.tokens(request_id, 10)
        executor.end(request_id, 11)
    assert stream.sender.column("output_ids") == [10, 11]
    assert len(unary.sender.wait()) == 1 and unary.sender.column("output_ids") == [1, 2, 10, 11]


def test_rows_of_a_batch_are_tagged_and_only_the_last_end_is_final(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = streamed([[1], [2], [3]])
    server.execute([request])
    executor.tokens(2, 20)
    executor.end(2, 21)
    executor.end(3, 30)
    executor.tokens(1, 10)
    executor.end(1, 11)
    responses = request.sender.wait()
    rows: dict[int, list[int]] = {}
    for response in responses:
        outputs = response.outputs()
        rows.setdefault(int(outputs["batch_index"][0, 0]), []).extend(outputs["output_ids"].reshape(-1).tolist())
    assert rows == {0: [10, 11], 1: [20, 21], 2: [30]}
    assert request.sender.finals == [len(responses) - 1]
    assert [executor.requests[n].input_token_ids for n in (1, 2, 3)] == [[1], [2], [3]]


def test_a_row_the_executor_refuses_is_its_own_error(server: ModelServer, executor: ScriptedExecutor) -> None:
    executor.refuse = [
        None,
        Overloaded("Exceeds maximum queue size: Maximum queue size of 1 is reached; send it later"),
    ]
    request = streamed([[1], [2]])
    server.execute([request])
    executor.end(1, 10)
    responses = request.sender.wait()
    (error,) = [response.error() for response in responses if response.has_error()]
    assert (
        error.message().startswith("[UNAVAILABLE] row 1: Exceeds maximum queue size")
        and "Maximum queue size of" in error.message()
    )
    assert request.sender.column("output_ids") == [10]


@pytest.mark.feature("001-04")
def test_one_bad_row_keeps_the_whole_request_from_running(server: ModelServer, executor: ScriptedExecutor) -> None:
    request = streamed([[1], [100]])
    server.execute([request])
    assert request.sender.error() == "[INVALID_ARGUMENT] input_ids holds 100, allowed is 0 to 99 (the vocabulary)"
    assert request.sender.finals == [0] and executor.requests == {}


@pytest.mark.feature("000-23")
def test_after_a_bad_request_the_next_one_is_served(server: ModelServer, executor: ScriptedExecutor) -> None:
    bad = token_request([[1]], embedding_bias=np.ones((1, 7), np.float32))
    good = token_request([[1]])
    server.execute([bad, good])
    executor.end(1, 5)
    assert "embedding bias shape is not as expected" in bad.sender.error()
    assert good.sender.column("output_ids") == [1, 5]


class Hostile(InferenceRequest):
    def inputs(self) -> Never:
        raise RuntimeError("secret in /private/path")


def test_an_unforeseen_exception_is_answered_without_its_text(server: ModelServer) -> None:
    request = Hostile({})
    assert server.execute([request]) is None
    assert request.sender.error() == "[INTERNAL] the request could not be taken in; see the server's log"


def test_no_inputs_at_all_are_answered(server: ModelServer) -> None:
    request = InferenceRequest({})
    server.execute([request])
    assert request.sender.error().startswith("[INVALID_ARGUMENT]")


def test_before_the_engine_is_there_requests_are_refused_as_unavailable(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    executor.hello = None
    request = streamed([[1]])
    server.execute([request])
    assert request.sender.error().startswith("[UNAVAILABLE] the engine is not ready yet")


def test_an_error_of_the_engine_reaches_the_client_with_its_code(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = streamed([[1]])
    server.execute([request])
    executor.tokens(1, 10)
    executor.error(1, "the engine process ended while the request ran")
    assert request.sender.error() == "[UNAVAILABLE] the engine process ended while the request ran"


# ---- cancellation ----------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_cancels_all_rows_and_the_stream_ends_once(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = streamed([[1], [2]])
    server.execute([request])
    executor.tokens(1, 10)
    request.sender.client_gone = True
    request.sender.wait()
    assert sorted(n for n, _ in executor.cancelled) == [1, 2]
    assert request.sender.finals == [len(request.sender.sent) - 1]


@pytest.mark.feature("002-31")
def test_a_stop_request_ends_the_request_of_its_id_with_what_it_has(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    running, other = streamed([[1]], 50, request_id="job"), streamed([[2]], 50, request_id="other")
    server.execute([running, other])
    executor.tokens(1, 10)
    stop = token_request([[1]], 0, request_id="job", input_lengths=ints(0), stop=bools(True))
    server.execute([stop])
    (answer,) = stop.sender.wait()
    assert not answer.has_error() and answer.outputs() == {} and stop.sender.finals == [0]
    assert running.sender.column("output_ids") == [10] and not running.sender.wait()[-1].has_error()
    assert [n for n, _ in executor.cancelled] == [1]
    executor.end(2, 20)
    assert other.sender.column("output_ids") == [20]


@pytest.mark.feature("002-31")
def test_a_stop_request_for_an_unknown_id_is_answered_the_same_and_one_without_id_refused(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    unknown = InferenceRequest({"stop": bools(True)}, request_id="nobody")
    nameless = InferenceRequest({"stop": bools(True)})
    server.execute([unknown, nameless])
    assert unknown.sender.wait()[0].outputs() == {} and unknown.sender.finals == [0]
    assert nameless.sender.error() == "[INVALID_ARGUMENT] A request id must be provided for request cancellation"
    assert executor.cancelled == []


@pytest.mark.feature("004-29")
def test_stop_of_a_session_is_answered_by_an_empty_final_response(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = token_request([[1]], 0, CORRID=uint64(9), STOP=ints(1), END=ints(1))
    server.execute([request])
    (answer,) = request.sender.wait()
    assert answer.outputs()["sequence_length"].tolist() == [[0]] and executor.stopped_sessions == [(9, True, "")]


def test_a_cancellation_while_rows_are_still_being_submitted_reaches_them_all(
    server: ModelServer, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = streamed([[1], [2], [3]])
    submit = executor.submit

    def slow_submit(*args: Any) -> RequestId:
        request_id = submit(*args)
        if request_id == 1:  # the client leaves after the first row; wait until the poller has seen it
            seen = threading.Event()
            request.sender.client_gone = True
            request.sender.on_cancel_check = seen.set
            assert seen.wait(10)
        return request_id

    monkeypatch.setattr(executor, "submit", slow_submit)
    server.execute([request])
    request.sender.wait()
    assert {n for n, _ in executor.cancelled} == {1, 2, 3}


def test_a_timeout_of_the_request_reaches_the_engine_in_seconds(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    server.execute([InferenceRequest(token_inputs([[1]]), timeout=1_500_000)])
    assert executor.requests[1].timeout_s == 1.5
    executor.end(1, reason=FinishReason.TIMED_OUT)


# ---- life of the server ----------------------------------------------------------------------------------------------


@pytest.mark.feature("001-65")
def test_the_set_of_live_requests_is_empty_after_five_hundred_of_all_kinds(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    requests = []
    for n in range(500):
        kind = n % 5
        request = streamed([[1]] * (1 + n % 3), request_id=str(n)) if kind < 4 else streamed([[200]])
        server.execute([request])
        requests.append(request)
        for request_id in list(executor.live):
            if kind == 0:
                executor.end(request_id, 1)
            elif kind == 1:
                executor.error(request_id, "broken")
            elif kind == 2:
                executor.cancel_request(request_id)
            else:
                request.sender.client_gone = True
        if kind == 3:
            server.execute([token_request([[1]], request_id=str(n), stop=bools(True))])
    for request in requests:
        request.sender.wait()
        assert len(request.sender.finals) == 1
    server._pump.close()  # a stream is struck off the list after its FINAL: wait for the sender threads
    assert server.num_live_streams == 0 and executor.live == {}


def test_a_drain_refuses_new_requests_and_ends_the_running_ones_after_the_grace(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    server = make_server(drain_grace_s=0.05)
    running = streamed([[1]])
    server.execute([running])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert running.sender.error().startswith("[UNAVAILABLE] the server is shutting down")
    late = streamed([[2]])
    server.execute([late])
    assert late.sender.error().startswith("[UNAVAILABLE] the server is shutting down")
    assert not server.is_ready() and [n for n, _ in executor.cancelled] == [1]


def test_a_request_that_ends_within_the_grace_ends_as_usual(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    server = make_server(drain_grace_s=60)
    running = streamed([[1]])
    server.execute([running])
    os.kill(os.getpid(), signal.SIGUSR1)
    executor.end(1, 10)
    assert running.sender.column("output_ids") == [10]


def test_the_engine_stays_until_other_models_requests_are_over(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(owner=True, drain_grace_s=60)
    executor.stats = EngineStats(IterationStats(num_active_requests=1), EngineCounters())
    asked, latest_stats = threading.Semaphore(0), executor.latest_stats
    monkeypatch.setattr(executor, "latest_stats", lambda: (latest_stats(), asked.release())[0])
    done = threading.Event()
    threading.Thread(target=lambda: (server._drain.wait_for_other_models(executor), done.set())).start()
    wait_for(asked)
    wait_for(asked)
    assert not done.is_set()
    executor.stats = EngineStats(IterationStats(num_active_requests=0), EngineCounters())
    assert done.wait(10)


def test_when_the_server_process_is_gone_the_stub_ends_itself(
    monkeypatch: pytest.MonkeyPatch, server: ModelServer, executor: ScriptedExecutor
) -> None:
    left: list[int] = []
    monkeypatch.setattr(housekeeper.os, "_exit", left.append)
    housekeeper.end_orphan(executor.shutdown)
    assert left == [1] and executor.was_shut_down


def test_a_change_of_the_parent_process_is_noticed() -> None:
    parents = iter([100, 100, 100, 1])
    noticed = threading.Event()
    keeper = Housekeeper(lambda: None, 0.001, lambda: None, noticed.set, lambda: next(parents, 1))
    keeper.start()
    assert noticed.wait(10)
    keeper.stop()


def test_a_tick_that_fails_does_not_end_the_housekeeper() -> None:
    calls = threading.Semaphore(0)

    def tick() -> None:
        calls.release()
        raise RuntimeError("metric gone")

    keeper = Housekeeper(tick, 0.001, lambda: None, lambda: None)
    keeper.start()
    wait_for(calls)
    wait_for(calls)
    keeper.stop()


def test_metrics_count_the_lengths_of_requests_that_ended(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    MetricFamily.created.clear()
    server = make_server(labels={"model": "m", "version": "1"}, owner=True)
    request = streamed([[1, 2, 3]])
    server.execute([request])
    executor.end(1, 7, 8)
    request.sender.wait()
    lengths = {family.name: family.metrics[0] for family in MetricFamily.created if family.name.startswith("nv_llm_")}
    assert eventually(lambda: lengths["nv_llm_output_token_len"].observed == [2.0])
    assert eventually(lambda: lengths["nv_llm_input_token_len"].observed == [3.0])


@pytest.mark.parametrize("policy", [True, False])
def test_the_transaction_policy_is_read_from_the_model_config(policy: bool) -> None:
    assert is_decoupled({"model_transaction_policy": {"decoupled": policy}}) is policy


def test_a_unary_model_refuses_streaming_and_serves_single_responses(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    server = make_server(decoupled=False)
    refused, served = streamed([[1]]), token_request([[1]])
    server.execute([refused, served])
    executor.end(1, 5)
    assert refused.sender.error() == "[INVALID_ARGUMENT] Streaming is only supported in decoupled mode."
    assert served.sender.column("output_ids") == [1, 5] and served.sender.finals == [0]


def test_a_second_drain_signal_changes_nothing() -> None:
    """The grace period must not begin anew with each of them."""
    drains: list[int] = []
    ticks = threading.Semaphore(0)
    keeper = Housekeeper(ticks.release, 0.001, lambda: drains.append(1), lambda: None)
    keeper.listen_for_drain()
    keeper.start()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(50):  # some rounds of the housekeeper, in which it has read the signal
            wait_for(ticks)
    keeper.stop()
    assert drains == [1]
