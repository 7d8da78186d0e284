"""Static batching, TensorRT-LLM's V1: a batch runs to its end before anybody joins, and is answered together."""

from __future__ import annotations

import pytest

from backend.api import EngineUnavailable
from backend.api.config.schema import RecordsConfig
from tests.engine.driver import Driver, answer

PROMPTS = {1: ([1, 2, 3], 3), 2: ([4, 5, 6, 7, 8], 7), 3: ([9], 2)}


def static(slots: int = 2, **options: object) -> Driver:
    return Driver(slots=slots, batching="static", records=RecordsConfig(max_iterations=1000), **options)


def ask_all(driver: Driver, **fields: object) -> None:
    for number, (prompt, max_tokens) in PROMPTS.items():
        driver.ask(prompt, max_tokens, request_id=number, **fields)


@pytest.mark.feature("001-21")
def test_a_late_request_starts_when_all_have_ended_and_the_short_one_is_answered_with_the_long_one() -> None:
    driver = static()
    ask_all(driver, streaming=False)
    driver.step()
    while not driver.responses:
        assert driver.core.latest_iteration().num_queued_requests == 1
        driver.step()
    assert set(driver.responses) == {1, 2}
    driver.run()
    for number, (prompt, max_tokens) in PROMPTS.items():
        assert driver.tokens(number) == prompt + answer(prompt, max_tokens)


@pytest.mark.feature("001-17")
def test_the_rows_that_have_ended_are_counted_as_empty_until_the_batch_is_over() -> None:
    driver = static()
    ask_all(driver)
    driver.run()
    steps = driver.core.take_records().iterations
    assert [step.num_empty_gen_slots for step in steps] == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert sum(step.num_ctx_tokens for step in steps) == 3 + 5 + 1
    assert sum(step.num_gen_requests for step in steps) == 2 + 6 + 1  # of each request the first token is the prompt's


def test_streamed_tokens_come_at_once_and_only_the_last_one_waits() -> None:
    driver = static()
    ask_all(driver, streaming=True)
    driver.step(3)
    assert len(driver.responses[1]) == 2 and not driver.responses[1][-1].is_final
    driver.run()
    assert [number for number in driver.responses if driver.tokens(number) == answer(*PROMPTS[number])] == [1, 2, 3]


def test_a_batch_is_as_large_as_the_slots_however_long_its_prompts_are() -> None:
    driver = static(slots=4, pool_tokens=256, max_num_tokens=8)
    prompts = [[number] * 20 for number in range(1, 5)]
    for prompt in prompts:
        driver.ask(prompt, 3)
    driver.run()
    steps = driver.core.take_records().iterations
    assert max(step.num_gen_requests for step in steps) == 4
    assert all(not (step.num_gen_requests and step.num_context_requests) for step in steps), "in lockstep"
    assert [driver.tokens(number) for number in range(1, 5)] == [answer(prompt, 3) for prompt in prompts]


def test_who_is_cancelled_or_times_out_is_answered_at_once_and_the_rest_of_the_batch_at_its_end() -> None:
    driver = static(slots=4)
    driver.ask([1], 2, request_id=1, streaming=False)
    driver.ask([2], 9, request_id=2, streaming=False)
    driver.ask([3], 9, request_id=3, streaming=False, timeout_s=1.0)
    driver.ask([4], 9, request_id=4, streaming=False)
    driver.step(3)
    driver.core.cancel(2)
    driver.clock.advance(2)
    driver.step()
    assert set(driver.responses) == {2, 3}
    driver.run()
    assert [driver.reason(number) for number in (1, 2, 3, 4)] == ["LENGTH", "CANCELLED", "TIMED_OUT", "LENGTH"]


def test_an_id_whose_answer_is_held_back_is_still_in_use() -> None:
    driver = static()
    driver.ask([1], 1, request_id=1, streaming=False)
    driver.ask([2], 9, request_id=2, streaming=False)
    driver.step(3)
    driver.ask([3], 1, request_id=1)
    assert "is in use" in driver.error(1)
    driver.run()
    assert driver.reason(1) == "LENGTH"


def test_answers_that_are_held_back_are_given_when_the_engine_fails() -> None:
    driver = static()
    driver.ask([1], 1, request_id=1, streaming=False)
    driver.ask([2], 9, request_id=2, streaming=False)
    driver.step(3)
    driver.core.fail_all(EngineUnavailable("gone"))
    answers = {response.request_id: response for response in driver.core.take_responses()}
    assert answers[1].result.is_final and answers[2].error_msg == "gone"


def test_the_policy_alone_keeps_others_out_and_answers_each_when_it_ends() -> None:
    driver = Driver(slots=2, policy="static_batch")
    ask_all(driver, streaming=False)
    driver.step(3)
    assert set(driver.responses) == {1}
    driver.step(2)
    assert driver.core.latest_iteration().num_queued_requests == 1
    driver.run()
    assert set(driver.responses) == {1, 2, 3}


@pytest.mark.feature("002-53")
def test_in_flight_batching_takes_half_the_steps_on_lengths_that_differ() -> None:
    def steps(batching: str) -> int:
        driver = Driver(slots=8, pool_tokens=8 * 128, batching=batching)
        for number in range(64):
            driver.ask([number + 1], 100 if number % 8 == 0 else 4)
        driver.run()
        return driver.core.counters.steps_total

    assert steps("static") >= 2 * steps("fused")
