"""GenerationResult: waiting, awaiting, iterating; text that grows by its diffs."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest

from backend.api import FinishReason
from backend.text.tokenizer import Tokenizer
from compat.llm import GenerationExecutorWorker, RequestError, ResultTimeout
from compat.llm.result_queue import ResultQueue
from tests.llm.helpers import (
    EVER,
    PATIENCE_S,
    Engine,
    StoppingWorkerGroup,
    expected,
    gated,
    make_worker,
    params,
    part,
)
from tests.text.random_sequences import text_in_characters

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def worker(tokenizer: Tokenizer) -> Iterator[GenerationExecutorWorker]:
    with make_worker(tokenizer) as worker:
        yield worker


@pytest.mark.feature("002-10")
def test_a_result_knows_its_request_and_is_not_done_before_it_is_asked(worker: GenerationExecutorWorker) -> None:
    result = worker.generate_async(PROMPT, params())
    assert result.request.prompt_token_ids == result.prompt_token_ids == PROMPT
    assert (result.request_id, result.streaming, result.done) == (result.request.id, False, False)
    assert isinstance(result.queue, ResultQueue)
    assert result.result(PATIENCE_S) is result
    assert result.done and result.finished


@pytest.mark.feature("002-19", "002-26")
def test_the_result_is_the_text_of_the_tokens(worker: GenerationExecutorWorker, tokenizer: Tokenizer) -> None:
    output = worker.generate_async(PROMPT, params(20)).result(PATIENCE_S).outputs[0]
    assert output.token_ids == expected(PROMPT, 20, tokenizer)
    assert output.text == text_in_characters(tokenizer, PROMPT, output.token_ids, True)
    assert (output.finish_reason, output.stop_reason, output.length) == ("length", None, 20)


@pytest.mark.feature("002-19")
def test_a_result_that_is_late_is_a_timeout_of_both_kinds_and_can_be_aborted() -> None:
    with gated() as (worker, gate):
        gate.clear()
        result = worker.generate_async(PROMPT, params(EVER))
        with pytest.raises(TimeoutError, match=r"was not over within 0.01 s; it goes on, wait again or abort it"):
            result.result(timeout=0.01)
        with pytest.raises(queue.Empty):
            result.result(timeout=0)
        worker.abort_request(result.request.id)
        gate.set()
        assert result.result(PATIENCE_S).outputs[0].finish_reason == "cancelled"


@pytest.mark.feature("002-19")
def test_the_timeout_is_for_the_whole_result_and_not_for_each_token() -> None:
    engine = Engine()
    result = engine.worker.generate_async(PROMPT, params(EVER), streaming=True)
    stopped = threading.Event()

    def talk() -> None:
        for _ in range(200):
            if stopped.wait(0.02):
                return
            engine.say(part([1]))
        engine.say(part([1], finish=FinishReason.LENGTH, is_final=True))

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        with pytest.raises(ResultTimeout):
            result.result(timeout=0.2)
    finally:
        stopped.set()
        talker.join()
        engine.worker.shutdown()


@pytest.mark.feature("002-20")
def test_a_hundred_results_are_awaited_in_one_event_loop_that_goes_on() -> None:
    """The model stands still until the event loop has turned many times with a hundred waiters in it."""

    async def run(worker: GenerationExecutorWorker, gate: threading.Event) -> list[list[int]]:
        gate.clear()
        results = [worker.generate_async([i + 1], params(4)) for i in range(100)]
        waiting = asyncio.gather(*(result.aresult(PATIENCE_S) for result in results))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        awaited = await waiting
        assert awaited == results
        return [result.token_ids for result in awaited]

    with gated() as (worker, gate):
        assert asyncio.run(run(worker, gate)) == [expected([i + 1], 4) for i in range(100)]


@pytest.mark.feature("002-20")
def test_awaiting_a_result_gives_the_result_and_may_have_a_timeout() -> None:
    async def run() -> None:
        with gated() as (worker, gate):
            gate.clear()
            result = worker.generate_async(PROMPT, params(3))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await result.aresult(timeout=0.01)
            assert result.queue._coroutines == [], "who has left is not remembered"
            gate.set()
            assert await result is result
            assert result.token_ids == expected(PROMPT, 3)

    asyncio.run(run())


@pytest.mark.feature("002-21", "002-23", "002-24", "002-56")
@pytest.mark.parametrize("seed", range(8))
def test_diffs_make_the_text_and_the_reason_comes_last(
    worker: GenerationExecutorWorker, tokenizer: Tokenizer, seed: int
) -> None:
    prompt = [seed + 2, 7]
    result = worker.generate_async(prompt, params(40, skip_special_tokens=False), streaming=True)
    text, ids, reasons = "", [], []
    for step in result:
        assert step is result
        text += step.text_diff
        ids += step.outputs[0].token_ids_diff
        reasons.append(step.outputs[0].finish_reason)
        assert step.text == text
        assert step.token_ids == ids
    assert ids == expected(prompt, 40, tokenizer)
    assert text == text_in_characters(tokenizer, prompt, ids, False)
    assert reasons == [None] * (len(reasons) - 1) + ["length"] and len(reasons) > 1
    assert list(result) == [], "it has ended"


@pytest.mark.feature("002-22", "002-23")
def test_a_stream_is_iterated_by_a_coroutine(worker: GenerationExecutorWorker) -> None:
    async def run() -> str:
        result = worker.generate_async(PROMPT, params(30), streaming=True)
        text = "".join([step.text_diff async for step in result])
        assert text == result.text
        return text

    assert asyncio.run(run()) == worker.generate_async(PROMPT, params(30)).result(PATIENCE_S).text


@pytest.mark.feature("002-21", "002-22")
def test_what_does_not_stream_cannot_be_iterated(worker: GenerationExecutorWorker) -> None:
    result = worker.generate_async(PROMPT, params())
    with pytest.raises(AssertionError, match="streaming"):
        iter(result)
    with pytest.raises(AssertionError, match="streaming"):
        next(result)
    with pytest.raises(AssertionError, match="streaming"):
        aiter(result)
    result.result(PATIENCE_S)


def test_all_who_wait_for_a_result_are_told_of_its_end() -> None:
    with gated() as (worker, gate):
        gate.clear()
        result = worker.generate_async(PROMPT, params(3))
        told: list[list[int]] = []
        threads = [threading.Thread(target=lambda: told.append(result.result(PATIENCE_S).token_ids)) for _ in range(4)]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert told == [expected(PROMPT, 3)] * 4


def test_a_coroutine_that_has_left_takes_no_result_with_it() -> None:
    async def run() -> None:
        engine = Engine()
        result = engine.worker.generate_async(PROMPT, params(3))
        waiting = asyncio.create_task(result.aresult())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.say(part([1, 2], finish=FinishReason.LENGTH, is_final=True))
        assert (await result.aresult(PATIENCE_S)).token_ids == [1, 2]
        engine.worker.shutdown()

    asyncio.run(run())


def test_an_event_loop_that_was_closed_holds_up_nobody() -> None:
    engine = Engine()
    result = engine.worker.generate_async(PROMPT, params(3))
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(result.aresult())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    engine.say(part([1], finish=FinishReason.LENGTH, is_final=True))
    assert result.result(PATIENCE_S).token_ids == [1]
    other = engine.worker.generate_async(PROMPT, params(3))
    engine.say(part([2], finish=FinishReason.LENGTH, is_final=True))
    assert other.result(PATIENCE_S).token_ids == [2], "whoever hands results out has survived it"
    engine.worker.shutdown()
    waiting._log_destroy_pending = False


@pytest.mark.feature("002-31")
def test_an_aborted_result_is_finished_as_cancelled_and_says_that_it_was_aborted() -> None:
    group = StoppingWorkerGroup(after=3)
    with make_worker(group=group) as worker:
        result = worker.generate_async(PROMPT, params(EVER), streaming=True)
        next(result)
        assert not result.aborted()
        result.abort()
        assert result.aborted()
        group.keep_going()
        assert result.result(PATIENCE_S).finish_reason == "cancelled"
        assert 0 < len(result.token_ids) <= 4


def test_an_error_is_raised_each_time_the_result_is_asked_for() -> None:
    engine = Engine()
    result = engine.worker.generate_async(PROMPT, params(), streaming=True)
    engine.fail("the prompt is too long, the limit is 3; shorten it")
    for _ in range(2):
        with pytest.raises(RequestError, match="^the prompt is too long, the limit is 3; shorten it$"):
            result.result(PATIENCE_S)
    assert result.done
    engine.worker.shutdown()


def test_tokens_are_told_at_the_interval_that_was_asked_for(tokenizer: Tokenizer) -> None:
    with make_worker(tokenizer, stream_interval=4) as worker:
        result = worker.generate_async(PROMPT, params(10), streaming=True)
        sizes = [len(step.outputs[0].token_ids_diff) for step in result]
    assert sizes == [4, 4, 2]
    assert result.token_ids == expected(PROMPT, 10, tokenizer)


def test_the_prompt_stands_in_front_where_it_is_asked_for(
    worker: GenerationExecutorWorker, tokenizer: Tokenizer
) -> None:
    output = worker.generate_async(PROMPT, params(5, exclude_input_from_output=False)).result(PATIENCE_S).outputs[0]
    assert output.token_ids == PROMPT + expected(PROMPT, 5, tokenizer)
    assert output.text == text_in_characters(tokenizer, [], output.token_ids, True)


@pytest.mark.feature("002-09")
def test_metrics_come_where_they_are_asked_for(worker: GenerationExecutorWorker) -> None:
    assert worker.generate_async(PROMPT, params()).result(PATIENCE_S).outputs[0].request_perf_metrics is None
    asked = [worker.generate_async(PROMPT, params(return_perf_metrics=True)).result(PATIENCE_S) for _ in range(2)]
    first, second = (result.outputs[0].request_perf_metrics for result in asked)
    assert 0 < first.arrival_ns <= first.first_scheduled_ns <= first.first_token_ns <= first.last_token_ns
    assert first.arrival_ns < second.arrival_ns and second.num_output_tokens == 8
