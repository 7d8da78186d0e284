"""The engine with a step in flight while it plans the next: what differs from one step at a time. The rest: tests/simulation."""

from __future__ import annotations

import logging

import pytest

from tests.engine.driver import VOCAB, Driver
from tests.fakes.hash_worker import oracle


def ahead(**fields: object) -> Driver:
    return Driver(looks_ahead=True, **fields)


def rows_of(driver: Driver) -> list[int]:
    return [len(step.rows) for step in driver.workers.trace]


def test_the_next_step_is_submitted_before_the_one_ahead_of_it_is_collected() -> None:
    driver = ahead()
    request_id = driver.ask([1, 2, 3], 3)
    driver.step()
    assert driver.workers.num_in_flight == 1 and request_id not in driver.responses
    driver.step()
    assert len(driver.workers.trace) == 2 and driver.workers.num_in_flight == 1
    assert driver.tokens(request_id) == oracle([1, 2, 3], 1, VOCAB)


def test_nothing_is_submitted_for_a_request_whose_last_token_is_in_flight() -> None:
    driver = ahead()
    request_id = driver.ask([1, 2, 3], 4)
    driver.run()
    assert driver.tokens(request_id) == oracle([1, 2, 3], 4, VOCAB)
    assert rows_of(driver) == [1, 1, 1, 1]


def test_a_token_that_ends_a_request_is_found_out_one_step_late_and_that_row_is_dropped() -> None:
    expected = oracle([5, 6], 3, VOCAB)
    driver = ahead()
    request_id = driver.ask([5, 6], 20, end_ids=(expected[2],))
    driver.run()
    assert driver.tokens(request_id) == expected and driver.reason(request_id) == "END_ID"
    assert rows_of(driver) == [1, 1, 1, 1], "one row more than tokens"
    assert driver.core.counters.generated_tokens_total == 3
    assert driver.used_blocks == 0 and driver.workers.num_in_flight == 0


def test_a_cancelled_request_ends_at_once_though_its_row_is_in_flight() -> None:
    driver = ahead()
    request_id = driver.ask([5, 6], 20)
    driver.step(3)
    driver.core.cancel(request_id)
    driver.run()
    assert driver.reason(request_id) == "CANCELLED"
    assert driver.tokens(request_id) == oracle([5, 6], 20, VOCAB)[: len(driver.tokens(request_id))]
    assert driver.used_blocks == 0


def test_a_pause_waits_for_the_step_in_flight() -> None:
    driver = ahead(pool_tokens=24, policy="max_utilization", reuse=False)
    asked = [driver.ask([n, n + 1, n + 2], 16) for n in (1, 50)]
    driver.run()
    assert driver.core.counters.pauses_total > 0
    for request_id, n in zip(asked, (1, 50), strict=True):
        assert driver.tokens(request_id) == oracle([n, n + 1, n + 2], 16, VOCAB)


def test_a_failed_step_takes_the_one_behind_it_along(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")
    driver = ahead()
    first = driver.ask([1, 2], 8)
    driver.workers.fail_next = RuntimeError("planted")
    driver.step()
    second = driver.ask([3, 4], 8)
    driver.run()
    assert all("the model step failed (RuntimeError)" in driver.error(request_id) for request_id in (first, second))
    third = driver.ask([3, 4], 8)
    driver.run()
    assert driver.tokens(third) == oracle([3, 4], 8, VOCAB)


def test_a_session_goes_on_though_its_last_turn_left_a_row_in_flight() -> None:
    expected = oracle([5, 6], 2, VOCAB)
    driver = ahead()
    first = driver.turn(7, [5, 6], 20, start=True)
    driver.step(4)
    driver.stop(7)
    said = driver.tokens(first)
    second = driver.turn(7, [9], 3)
    driver.run()
    assert said[:2] == expected
    assert driver.tokens(second) == oracle([5, 6, *said, 9], 3, VOCAB, counter=len(said))
