"""GenerationExecutor: submitting, ids, dispatching, errors, the end."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

from backend.api import EngineUnavailable, FinishReason, Response
from backend.engine import loop as engine_loop
from compat.llm import (
    BackgroundError,
    GenerationExecutor,
    GenerationExecutorWorker,
    GenerationRequest,
    NotHere,
    RequestError,
    SamplingParams,
)
from compat.llm.statistics import LatestStats
from tests.fakes.hash_worker import HashWorkerGroup, oracle
from tests.llm.helpers import EVER, PATIENCE_S, Engine, StoppingWorkerGroup, expected, gated, make_worker, params, part

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.feature("002-01")
def test_the_base_class_leaves_open_what_an_executor_does_and_generates_with_it() -> None:
    open_methods = GenerationExecutor.__abstractmethods__
    assert {"submit", "abort_request", "shutdown"} <= open_methods
    assert not {"generate", "generate_async", "get_stats"} & open_methods
    assert inspect.isabstract(GenerationExecutor) and not inspect.isabstract(GenerationExecutorWorker)
    seen: list[GenerationRequest] = []

    class Recorder(GenerationExecutorWorker):
        def __init__(self) -> None:
            GenerationExecutor.__init__(self)

        def submit(self, request: GenerationRequest) -> str:
            seen.append(request)
            return "result"

    asked = SamplingParams(max_tokens=3)
    assert Recorder().generate_async([1, 2], asked, [3], streaming=True) == "result"
    assert (seen[0].prompt_token_ids, seen[0].query_token_ids, seen[0].streaming) == ([1, 2], [3], True)
    assert seen[0].sampling_params is asked


@pytest.mark.feature("002-02")
def test_submitting_returns_at_once_while_the_model_is_busy() -> None:
    with gated() as (worker, gate):
        gate.clear()
        results = [worker.submit(GenerationRequest(PROMPT, params(3))) for _ in range(20)]
        assert not any(result.done for result in results), "nobody has waited for the model"
        gate.set()
        assert [result.result(PATIENCE_S).token_ids for result in results] == [expected(PROMPT, 3)] * 20


@pytest.mark.feature("002-03")
def test_client_ids_are_given_once_by_many_threads() -> None:
    with make_worker() as worker:
        given: list[int] = []
        threads = [
            threading.Thread(target=lambda: given.extend([worker._get_next_client_id() for _ in range(100)]))
            for _ in range(100)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(given)) == len(given) == 10_000


@pytest.mark.feature("002-03")
def test_client_ids_begin_again_after_64_bits() -> None:
    with make_worker() as worker:
        worker._last_client_id = 2**64 - 2
        results = [worker.generate_async(PROMPT, params(2)) for _ in range(3)]
        assert [result.request_id for result in results] == [2**64 - 1, 0, 1]
        assert [result.result(PATIENCE_S).token_ids for result in results] == [expected(PROMPT, 2)] * 3


@pytest.mark.feature("002-04")
def test_a_request_is_submitted_once() -> None:
    with make_worker() as worker:
        request = GenerationRequest(PROMPT, params(2))
        worker.submit(request).result(PATIENCE_S)
        with pytest.raises(ValueError, match="already has the id"):
            worker.submit(request)


@pytest.mark.feature("002-05")
def test_wrong_types_are_told_at_once() -> None:
    with make_worker() as worker:
        with pytest.raises(TypeError, match="prompt_token_ids"):
            worker.generate_async("text", params())
        with pytest.raises(TypeError, match="sampling_params is a dict"):
            worker.generate_async(PROMPT, {"max_tokens": 3})
        with pytest.raises(NotHere, match="prompt_tuning_config"):
            worker.generate_async(PROMPT, params(), prompt_tuning_config=object())
        with pytest.raises(TypeError, match="lora_request is a object, a LoRARequest is needed"):
            worker.generate_async(PROMPT, params(), lora_request=object())


@pytest.mark.feature("002-06")
def test_prompts_have_parameters_each_and_results_in_their_order() -> None:
    with make_worker() as worker:
        prompts = [[1, 2, 3], [4], [5, 6]]
        results = worker.generate(prompts, [params(5), params(9), params(2)])
        assert [result.token_ids for result in results] == [
            expected(prompt, n) for prompt, n in zip(prompts, (5, 9, 2))
        ]
        assert [len(result.token_ids) for result in worker.generate(prompts, params(4))] == [4, 4, 4]
        assert worker.generate([7, 8], params(3)).token_ids == expected([7, 8], 3)
        assert worker.generate(np.array([7, 8]), params(3)).token_ids == expected([7, 8], 3)
        assert [result.token_ids for result in worker.generate(np.array([[7, 8]]), params(3))] == [expected([7, 8], 3)]


@pytest.mark.feature("002-06")
def test_another_number_of_parameters_than_of_prompts_is_an_error() -> None:
    with make_worker() as worker:
        with pytest.raises(ValueError, match="sampling_params has 2 entries, and there are 3 prompts"):
            worker.generate([[1], [2], [3]], [params(), params()])
        with pytest.raises(TypeError, match="sampling_params is a list"):
            worker.generate([1], [params()])


@pytest.mark.feature("002-08")
def test_a_query_behind_its_context_is_the_plain_prompt_and_finds_the_context_again() -> None:
    context = list(range(1, 17))  # four blocks
    with make_worker() as worker:
        worker.generate(context, params(1), cache_salt="mine")
        wanted = params(6, return_perf_metrics=True)
        asked = worker.generate_async(context, wanted, query_token_ids=[50, 51], cache_salt="mine")
        output = asked.result(PATIENCE_S).outputs[0]
        assert output.token_ids == oracle([*context, 50, 51], 6, 1000, namespace="mine")
        assert output.request_perf_metrics.num_cached_tokens == 16


@pytest.mark.feature("002-48")
def test_the_same_tokens_with_another_image_share_nothing() -> None:
    prompt = list(range(1, 17))
    asked = params(1, return_perf_metrics=True)
    with make_worker(group=HashWorkerGroup(takes_extra_inputs=True)) as worker:
        found = [
            worker.generate(prompt, asked, multimodal_params={"image": image}, cache_salt="mine")
            .outputs[0]
            .request_perf_metrics.num_cached_tokens
            for image in (b"one", b"two", b"one")
        ]
    assert found[:2] == [0, 0] and found[2] > 0


@pytest.mark.feature("002-15")
def test_responses_that_nobody_waits_for_are_skipped() -> None:
    engine = Engine()
    result = engine.worker.generate_async(PROMPT, params(), streaming=True)
    engine.answer(Response(999, None, part([1])))
    engine.say(part([2], finish=FinishReason.LENGTH, is_final=True))
    assert result.result(PATIENCE_S).token_ids == [2]
    after = engine.worker.generate_async(PROMPT, params())
    engine.say(part([3]), number=0)
    engine.say(part([4], finish=FinishReason.LENGTH, is_final=True))
    assert after.result(PATIENCE_S).token_ids == [4]
    engine.worker.shutdown()


@pytest.mark.feature("002-15")
def test_the_engine_is_told_the_client_id_and_finds_by_its_own() -> None:
    engine = Engine()
    first, second = (engine.worker.generate_async(PROMPT, params()) for _ in range(2))
    assert [request.client_id for request in engine.requests] == [first.request_id, second.request_id]
    engine.say(part([2], finish=FinishReason.LENGTH, is_final=True), number=1)
    engine.say(part([1], finish=FinishReason.LENGTH, is_final=True), number=0)
    assert (first.result(PATIENCE_S).token_ids, second.result(PATIENCE_S).token_ids) == ([1], [2])
    second.abort()
    assert engine.cancelled == [], "it is over"
    third = engine.worker.generate_async(PROMPT, params())
    third.abort()
    assert engine.cancelled == [engine.engine_id(2)]
    engine.worker.shutdown()


@pytest.mark.feature("002-16")
def test_responses_are_dispatched_by_a_thread_that_ends_with_the_executor() -> None:
    with make_worker() as worker:
        dispatcher = worker._thread
        assert dispatcher.is_alive() and dispatcher.name == "llm-dispatch"
        seen: list[threading.Thread] = []
        deliver = worker._inline.handle
        worker._inline.handle = lambda given: (seen.append(threading.current_thread()), deliver(given))[1]
        worker.generate(PROMPT, params(2))
        assert set(seen) == {dispatcher}
    assert not dispatcher.is_alive()


@pytest.mark.feature("002-17")
def test_nothing_is_kept_of_requests_that_are_over() -> None:
    engine = Engine()
    for number in range(10_000):
        result = engine.worker.generate_async([1], params())
        if number % 3 == 0:
            engine.say(part([1]))
        if number % 3 == 1:
            engine.fail("no")
            continue
        engine.say(part([2], finish=FinishReason.LENGTH, is_final=True))
    result.result(PATIENCE_S)
    assert engine.worker._results == {}
    assert engine.worker._inline.num_requests == 0
    engine.worker.shutdown()
    del engine
    gc.collect()


@pytest.mark.feature("002-18")
def test_an_error_of_one_request_is_raised_for_that_request_only() -> None:
    with make_worker() as worker:
        bad = worker.generate_async([5000], params(3))
        good = worker.generate_async(PROMPT, params(3))
        with pytest.raises(RequestError, match="input token 5000 is outside the vocabulary") as raised:
            bad.result(PATIENCE_S)
        assert raised.value.code == "INVALID_ARGUMENT"
        assert good.result(PATIENCE_S).token_ids == expected(PROMPT, 3)


@pytest.mark.feature("002-18")
def test_a_fault_of_the_dispatcher_is_raised_to_all_who_wait_and_to_all_who_come() -> None:
    with gated() as (worker, gate):
        gate.clear()
        waiting = [worker.generate_async(PROMPT, params(3)) for _ in range(3)]
        fault = RuntimeError("planted")

        def fail(arrival: object) -> None:
            raise fault

        worker._hand_on = fail
        gate.set()
        for result in waiting:
            with pytest.raises(BackgroundError, match="make a new executor") as raised:
                result.result(PATIENCE_S)
            assert raised.value.__cause__ is fault
        with pytest.raises(BackgroundError):
            worker.generate_async(PROMPT, params(3))
        assert worker._results == {}


@pytest.mark.feature("002-31")
def test_a_request_is_aborted_while_it_waits_while_it_runs_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = StoppingWorkerGroup(after=3)
    with make_worker(group=group) as worker:
        running = worker.generate_async(PROMPT, params(EVER), streaming=True)
        next(running)
        queued = worker.generate_async(PROMPT, params(EVER))
        worker.abort_request(queued.request_id)
        worker.abort_request(running.request_id)
        group.keep_going()
        assert queued.result(PATIENCE_S).finish_reason == "cancelled"
        assert running.result(PATIENCE_S).finish_reason == "cancelled"
        assert "nothing to abort" not in caplog.text
        worker.abort_request(running.request_id)
        assert f"request {running.request_id} is over or unknown; there is nothing to abort" in caplog.text
        core = worker.engine_executor._transport._core
        assert worker.generate(PROMPT, params(2)).token_ids == expected(PROMPT, 2)
    assert core.kv.stats().used_num_blocks == 0


@pytest.mark.feature("002-32")
def test_shutting_down_twice_does_nothing_more_and_fails_who_waits() -> None:
    with gated() as (worker, gate):
        gate.clear()
        pending = worker.generate_async(PROMPT, params(EVER))
        heard: list[BaseException] = []

        def wait() -> None:
            try:
                pending.result(PATIENCE_S)
            except BaseException as error:
                heard.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        closer = threading.Thread(target=worker.shutdown)
        closer.start()
        gate.set()
        closer.join(PATIENCE_S)
        waiter.join(PATIENCE_S)
        assert isinstance(heard[0], RequestError | EngineUnavailable)
        worker.shutdown()
        with pytest.raises(EngineUnavailable, match="shut down"):
            worker.generate_async(PROMPT, params())


AT_EXIT = """
from tests.llm.helpers import make_worker, params
worker = make_worker()
result = worker.generate_async([1, 2], params(3000), streaming=True)
next(result)
import atexit
"""


@pytest.mark.feature("002-32")
def test_a_program_that_forgets_to_shut_down_ends() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.feature("002-55")
def test_submitting_wakes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that nobody wakes sleeps for an hour here."""
    monkeypatch.setattr(engine_loop, "MAX_IDLE_S", 3600.0)
    with make_worker() as worker:
        waits: list[int] = []
        for _ in range(20):
            asked = worker.generate_async(PROMPT, params(1, return_perf_metrics=True)).result(PATIENCE_S)
            metrics = asked.outputs[0].request_perf_metrics
            waits.append(metrics.first_scheduled_ns - metrics.arrival_ns)
        assert min(waits) < 1_000_000, "the promise is a millisecond"


@pytest.mark.feature("002-30")
def test_the_latest_statistics_say_how_many_run_and_how_many_wait() -> None:
    """While the model is paused in its ninth step."""
    group = StoppingWorkerGroup(after=9)
    with make_worker(group=group) as worker:
        assert worker.get_latest_stats() == LatestStats(0, 0, 0)
        group.gate.clear()
        results = [worker.generate_async([i + 1], params(100), streaming=True) for i in range(11)]
        group.gate.set()
        for _ in range(9):
            next(results[0])
        latest = worker.get_latest_stats()
        assert (latest.num_active_requests, latest.num_queued_requests, latest.current_batch_size) == (11, 3, 8)
        group.keep_going()
        assert all(result.result(PATIENCE_S).finished for result in results)


@pytest.mark.feature("002-40", "002-50")
def test_the_batch_never_exceeds_its_limit() -> None:
    group = HashWorkerGroup()
    with make_worker(group=group) as worker:
        worker.generate([[i + 1] for i in range(30)], params(5))
        assert max(len(step.rows) for step in group.trace) == 8
