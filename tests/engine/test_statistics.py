"""What the engine says of its latest step and of itself."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver


def test_the_latest_iteration_is_told_with_the_gauges_of_the_present() -> None:
    driver = Driver(max_num_tokens=8)
    assert (driver.core.latest_iteration().timestamp_ns, driver.core.latest_iteration().max_num_active_requests) == (
        0,
        4,
    )
    driver.ask([1, 2, 3], 5)
    driver.step()
    driver.ask([4] * 20, 5)
    driver.clock.advance(2)
    driver.step()
    latest = driver.core.latest_iteration()
    assert (latest.iter, latest.num_gen_requests, latest.num_context_requests, latest.num_ctx_tokens) == (1, 1, 1, 7)
    assert latest.num_scheduled_requests == latest.num_active_requests == 2
    assert latest.timestamp_ns == driver.clock.time_ns()
    driver.clock.advance(3)
    assert driver.core.latest_iteration().timestamp_ns == latest.timestamp_ns, "when the step ended, not when one asks"


def test_requests_that_ended_are_counted_in_the_step_after_which_they_had() -> None:
    driver = Driver()
    driver.ask([1], 1)
    driver.ask([2], 2)
    completed = []
    while driver.core.has_work:
        driver.step()
        completed.append(driver.core.latest_iteration().num_completed_requests)
    assert completed == [1, 1]


def test_statistics_that_were_taken_do_not_change_any_more() -> None:
    driver = Driver()
    driver.ask([1], 1)
    driver.run()
    taken = driver.core.stats().counters
    driver.ask([2], 1)
    driver.run()
    assert (taken.generated_tokens_total, taken.requests_finished_total) == (1, {"LENGTH": 1})
    assert driver.core.stats().counters.requests_finished_total == {"LENGTH": 2}


@pytest.mark.feature("002-30")
def test_active_and_queued_requests_and_the_size_of_the_batch_are_told() -> None:
    driver = Driver(slots=2)
    for request in range(5):
        driver.ask([request], 3)
    waiting = driver.core.stats().latest
    assert (waiting.num_active_requests, waiting.num_queued_requests, waiting.num_scheduled_requests) == (5, 5, 0)
    driver.step()
    running = driver.core.stats().latest
    assert (running.num_active_requests, running.num_queued_requests, running.num_scheduled_requests) == (5, 3, 2)
    driver.run()
    idle = driver.core.stats().latest
    assert (idle.num_active_requests, idle.num_queued_requests, idle.num_scheduled_requests) == (0, 0, 0)
