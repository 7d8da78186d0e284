"""Requests through EngineCore: what comes back, and when it ends."""

from __future__ import annotations

import random

import pytest

from backend.api import ErrorCode, OutputConfig, SamplingConfig, SessionConfig
from tests.engine.driver import Driver, answer


@pytest.mark.feature("000-26")
@pytest.mark.parametrize("exclude", [False, True])
def test_without_streaming_there_is_one_final_response_with_or_without_the_prompt(exclude: bool) -> None:
    driver = Driver()
    output = OutputConfig(exclude_input_from_output=exclude)
    request = driver.ask([1, 2, 3], 5, streaming=False, output_config=output)
    driver.run()
    assert len(driver.responses[request]) == 1
    assert driver.tokens(request) == ([] if exclude else [1, 2, 3]) + answer([1, 2, 3], 5)


@pytest.mark.feature("000-25", "000-27")
def test_streamed_results_hold_the_new_tokens_and_never_the_prompt() -> None:
    driver = Driver()
    request = driver.ask([1, 2, 3], 6)
    driver.run()
    shapes = [[len(beam) for beam in r.result.output_token_ids] for r in driver.responses[request]]
    assert shapes == [[1]] * 6
    assert [r.result.is_final for r in driver.responses[request]] == [False] * 5 + [True]
    assert driver.tokens(request) == answer([1, 2, 3], 6)


@pytest.mark.feature("000-21")
def test_all_generated_tokens_so_far_can_be_asked_for() -> None:
    driver = Driver()
    request = driver.ask([4], 4, return_all_generated_tokens=True)
    driver.run()
    expected = answer([4], 4)
    assert [r.result.output_token_ids[0] for r in driver.responses[request]] == [expected[: n + 1] for n in range(4)]


@pytest.mark.feature("000-16")
def test_a_stop_word_ends_the_output_and_stays_in_it() -> None:
    driver = Driver()
    expected = answer([1, 2, 3, 4], 12)
    request = driver.ask([1, 2, 3, 4], 12, stop_words=[[999, 998], expected[4:6]])
    driver.run()
    assert driver.tokens(request) == expected[:6]
    assert driver.reason(request) == "STOP_WORDS"


def test_a_stop_word_must_lie_within_the_output() -> None:
    driver = Driver()
    expected = answer([1, 2, 3, 4], 6)
    request = driver.ask([1, 2, 3, 4], 6, stop_words=[[4, expected[0]]])
    driver.run()
    assert driver.reason(request) == "LENGTH"


@pytest.mark.parametrize("min_tokens, ends_after", [(0, 3), (3, 3), (4, 8)])
def test_an_end_id_ends_the_output_but_not_before_min_tokens(min_tokens: int, ends_after: int) -> None:
    driver = Driver()
    expected = answer([7, 7], 8)
    config = SamplingConfig(min_tokens=min_tokens)
    request = driver.ask([7, 7], 8, end_ids=(expected[2],), sampling_config=config)
    driver.run()
    assert driver.tokens(request) == expected[:ends_after]


def test_max_tokens_0_computes_the_prompt_and_generates_nothing() -> None:
    driver = Driver()
    request = driver.ask([1, 2, 3, 4, 5], 0)
    driver.run()
    assert driver.tokens(request) == [] and driver.reason(request) == "LENGTH"
    assert driver.core.counters.context_tokens_total == 5


@pytest.mark.feature("000-10", "001-01")
def test_a_request_joins_at_the_next_iteration_and_is_done_before_a_longer_one() -> None:
    driver = Driver()
    long = driver.ask([1], 20)
    driver.step(3)
    short = driver.ask([2], 3)
    driver.step()
    assert len(driver.workers.trace[-1].rows) == 2, "both were scheduled together"
    assert len(driver.responses[short]) == 1
    driver.step(2)
    assert driver.reason(short) == "LENGTH"
    assert len(driver.responses[long]) == 6
    driver.run()
    assert driver.tokens(long) == answer([1], 20)


@pytest.mark.feature("000-24")
@pytest.mark.parametrize("seed", range(20))
def test_there_is_exactly_one_final_response_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(pool_tokens=48, policy=rng.choice(["guaranteed_no_evict", "max_utilization"]))
    requests = []
    for _ in range(30):
        event = rng.random()
        if event < 0.4:
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
            requests.append(driver.ask(prompt, rng.randrange(0, 20), streaming=rng.random() < 0.5))
        elif event < 0.6 and requests:
            driver.core.cancel(rng.choice(requests))
        else:
            driver.step(rng.randrange(1, 4))
    driver.run()
    driver.step()
    for request in requests:
        assert [response.is_final for response in driver.responses[request]].count(True) == 1
        assert driver.responses[request][-1].is_final
    assert driver.used_blocks == 0


@pytest.mark.feature("000-23", "001-64")
def test_a_request_that_cannot_run_is_answered_with_an_error_and_the_next_succeeds() -> None:
    driver = Driver(max_seq_len=32)
    bad = driver.ask([1] * 40, 4)
    good = driver.ask([1, 2], 4)
    driver.run()
    assert "40 tokens" in driver.error(bad)
    assert driver.tokens(good) == answer([1, 2], 4)


@pytest.mark.feature("001-07")
def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    driver = Driver()
    driver.ask([1, 2], 4, request_id=7)
    driver.step()
    driver.ask([3, 4], 4, request_id=7)
    assert "in use" in driver.responses[7][-1].error_msg
    del driver.responses[7][-1]
    driver.run()
    assert driver.tokens(7) == answer([1, 2], 4)


@pytest.mark.feature("000-62")
def test_a_full_queue_refuses_with_unavailable() -> None:
    driver = Driver(slots=1)
    caps = driver.core.config.limits.max_queue_size
    requests = [driver.ask([1], 2) for _ in range(caps + 2)]
    refused = [r for r in requests if r in driver.responses]
    assert len(refused) == 2
    assert driver.responses[refused[0]][0].error_code is ErrorCode.UNAVAILABLE
    assert "Exceeds maximum queue size" in driver.error(refused[0])


@pytest.mark.feature("000-62")
def test_a_deadline_ends_a_waiting_and_a_running_request() -> None:
    driver = Driver(slots=1)
    running, waiting = driver.ask([1], 50, timeout_s=5.0), driver.ask([2], 50, timeout_s=3.0)
    driver.step(2)
    driver.clock.advance(4)
    driver.step()
    assert driver.reason(waiting) == "TIMED_OUT" and driver.tokens(waiting) == []
    driver.clock.advance(2)
    driver.step()
    assert driver.reason(running) == "TIMED_OUT"
    assert driver.used_blocks == 0 and driver.core.num_live == 0


@pytest.mark.feature("001-58", "000-07", "002-31")
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_a_cancelled_request_is_free_at_once_in_every_phase(steps: int) -> None:
    driver = Driver(max_num_tokens=8)
    request = driver.ask(list(range(30)), 10)
    driver.step(steps)
    driver.core.cancel(request)
    assert driver.used_blocks == 0 and driver.core.num_live == 0
    driver.step()
    assert driver.reason(request) == "CANCELLED"
    assert driver.tokens(request) == answer(range(30), 10)[: len(driver.tokens(request))]


def test_a_failed_step_ends_its_requests_and_evicts_the_others_to_token_ids() -> None:
    driver = Driver(slots=1)
    first = driver.turn(1, [1, 2, 3], 4, start=True)
    driver.run()
    hurt, waiting = driver.ask([9], 5), driver.ask([8], 5)
    driver.workers.fail_next = RuntimeError("CUDA error: an illegal memory access was encountered at 0xdeadbeef")
    driver.step()
    assert "0x" not in driver.error(hurt) and "RuntimeError" in driver.error(hurt)
    driver.run()
    assert driver.tokens(waiting) == answer([8], 5)
    again = driver.turn(1, [5], 4)
    driver.run()
    assert driver.tokens(again) == answer([1, 2, 3, *driver.tokens(first), 5], 4, counter=4)


@pytest.mark.feature("004-32")
def test_sampling_goes_on_across_turns_where_it_stopped() -> None:
    driver = Driver()
    first = driver.ask([1, 2], 4, sampling_config=SamplingConfig(seed=77), session=SessionConfig(5, start=True))
    driver.run()
    second = driver.ask([3], 4, session=SessionConfig(5))
    driver.run()
    history = [1, 2, *driver.tokens(first), 3]
    assert driver.tokens(first) == answer([1, 2], 4, seed=77)
    assert driver.tokens(second) == answer(history, 4, seed=77, counter=4)


@pytest.mark.feature("003-63", "003-64")
def test_a_step_is_schedule_run_workers_update_publish() -> None:
    driver = Driver()
    request = driver.ask([1, 2, 3], 2)
    responses = driver.core.step()
    (step,) = driver.workers.trace
    assert [(row.num_computed, row.num_tokens, row.samples) for row in step.rows] == [(0, 3, True)]
    assert [r.result.output_token_ids[0] for r in responses if r.request_id == request] == [answer([1, 2, 3], 1)]
    assert driver.core.iteration == 1


@pytest.mark.feature("003-12")
def test_inputs_besides_tokens_reach_the_model_again_after_a_pause_and_never_share_kv() -> None:
    driver = Driver(pool_tokens=24, policy="max_utilization", slots=2, takes_extra_inputs=True)
    images = [{"image": b"a cat"}, {"image": b"a dog"}]
    requests = [driver.ask([1, 2, 3, 4, 5], 12, extra_inputs=image) for image in images]
    driver.run()
    rows = [row for step in driver.workers.trace for row in step.new_rows]
    assert driver.core.counters.pauses_total > 0 and len(rows) > 2
    by_namespace = {row.cache_namespace: row.extra_inputs for row in rows}
    assert list(by_namespace.values()) == images
    assert all(row.extra_inputs == by_namespace[row.cache_namespace] for row in rows)
    assert driver.core.counters.cached_tokens_total == 0
    assert [driver.reason(request) for request in requests] == ["LENGTH"] * 2


@pytest.mark.feature("003-12")
def test_a_model_that_takes_tokens_only_refuses_them() -> None:
    driver = Driver()
    request = driver.ask([1], 1, extra_inputs={"image": b"a cat"})
    assert "image" in driver.error(request)


@pytest.mark.feature("002-24", "002-44")
def test_a_finish_reason_is_told_with_the_last_response_only() -> None:
    driver = Driver(slots=8, pool_tokens=512)
    end_id = answer([1, 2], 8)[3]
    ended = driver.ask([1, 2], 8, end_ids=(end_id,))
    cut = driver.ask([3], 5)
    cancelled, late = driver.ask([4], 50), driver.ask([5], 50, timeout_s=3.0)
    driver.step(6)
    driver.core.cancel(cancelled)
    driver.clock.advance(4)
    driver.run()
    reasons = {
        request: [r.result.finish_reasons[0].openai_name for r in driver.responses[request]]
        for request in (ended, cut, cancelled, late)
    }
    assert reasons[ended] == [None] * (len(driver.tokens(ended)) - 1) + ["stop"]
    assert driver.tokens(ended)[-1] == end_id and end_id not in driver.tokens(ended)[:-1]
    assert reasons[cut] == [None] * 4 + ["length"]
    assert reasons[cancelled] == [None] * 6 + ["cancelled"] and reasons[late] == [None] * 6 + ["timeout"]


@pytest.mark.feature("002-09")
def test_the_arrival_of_each_request_is_told_in_its_metrics_and_orders_them() -> None:
    driver = Driver(slots=1)
    output = OutputConfig(return_perf_metrics=True)
    requests = []
    for n in range(4):
        driver.clock.advance(1)
        requests.append(driver.ask([n], 2, output_config=output))
    driver.clock.advance(1)
    driver.run()
    metrics = [driver.responses[request][-1].result.perf_metrics for request in requests]
    assert [m.arrival_ns for m in metrics] == [n * 10**9 + metrics[0].arrival_ns for n in range(4)]
    assert all(0 < m.arrival_ns < m.first_scheduled_ns <= m.first_token_ns <= m.last_token_ns for m in metrics)
