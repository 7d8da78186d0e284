"""Failed steps, shrunk pools, undone turns: what ends, what goes on, and that no session remembers a failed turn."""

from __future__ import annotations

import pytest

from backend.api import EngineUnavailable, ErrorCode, Request, SamplingConfig, SessionConfig
from backend.core.step import StepOutput
from tests.engine.driver import Driver, answer


@pytest.fixture
def driver() -> Driver:
    """A driver with a session that has had one turn: [1, 2] and four outputs."""
    driver = Driver()
    driver.turn(1, [1, 2], 4, start=True)
    driver.run()
    return driver


LOG = [1, 2, *answer([1, 2], 4)]


@pytest.mark.feature("004-30")
def test_a_turn_that_the_engine_cannot_serve_ends_with_code_5(driver: Driver) -> None:
    failed = driver.turn(1, [3], 4)
    driver.workers.fail_next = RuntimeError("planted")
    driver.run()
    (response,) = driver.responses[failed]
    assert response.error_msg.startswith("session error 5 (fail): the model step failed (RuntimeError)")
    assert response.error_code is ErrorCode.INTERNAL


def test_a_failed_turn_is_undone_so_that_it_can_be_sent_again(driver: Driver) -> None:
    driver.turn(1, [3], 4)
    driver.step(2)
    driver.workers.fail_next = RuntimeError("planted")
    driver.run()
    assert driver.log(1) == LOG
    again = driver.turn(1, [3], 4)
    driver.run()
    assert driver.tokens(again) == answer([*LOG, 3], 4, counter=4)


@pytest.mark.feature("004-32")
@pytest.mark.parametrize("seed", [None, 9])
def test_a_turn_cancelled_before_it_ran_does_not_move_the_random_stream(driver: Driver, seed: int | None) -> None:
    sampling = SamplingConfig(seed=seed)
    cancelled = driver.ask([7] * 9, 4, session=SessionConfig(1), sampling_config=sampling)
    driver.core.cancel(cancelled)
    assert driver.log(1) == LOG
    again = driver.turn(1, [3], 4)
    driver.run()
    assert driver.tokens(again) == answer([*LOG, 3], 4, counter=4)


def test_all_live_requests_are_answered_when_the_engine_ends(driver: Driver) -> None:
    plain, turn = driver.ask([5], 9), driver.turn(1, [3], 9)
    driver.step(2)
    driver.core.fail_all(EngineUnavailable("the engine is shutting down"))
    last = {response.request_id: response for response in driver.core.take_responses()}
    assert last[plain].error_msg == "the engine is shutting down" and last[plain].error_code is ErrorCode.UNAVAILABLE
    assert last[turn].error_msg == "session error 5 (fail): the engine is shutting down"
    assert not driver.core.has_work and driver.used_blocks == 0
    driver.core.check_integrity()


def test_a_request_id_may_be_used_again_after_its_final_response(driver: Driver) -> None:
    first = driver.ask([5], 3)
    driver.run()
    driver.core.enqueue(first, Request([6], 3, streaming=True))
    driver.run()
    assert driver.tokens(first) == answer([5], 3) + answer([6], 3)


def test_namespaces_of_which_nothing_is_cached_are_not_remembered() -> None:
    driver = Driver(pool_tokens=32)
    for number in range(50):
        driver.ask([1] * 9, 1, cache_salt=str(number))
        driver.run()
    assert len(driver.core.kv.state.trie._roots) <= driver.core.kv.state.blocks.num_blocks


def test_answers_for_other_rows_than_those_that_ran_are_a_failed_step() -> None:
    driver = Driver()
    collect = driver.workers.collect

    def mixed_up() -> StepOutput:
        output = collect()
        return StepOutput(output.step_id, output.sampled[::-1])

    driver.workers.collect = mixed_up
    asked = [driver.ask([1, 2], 3), driver.ask([3, 4], 3)]
    driver.run()
    assert all("the model step failed (RuntimeError)" in driver.error(request_id) for request_id in asked)
