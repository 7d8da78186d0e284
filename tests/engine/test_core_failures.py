"""Failed steps, shrunk pools, undone turns: what ends, what goes on, and that no session remembers a failed turn."""

from __future__ import annotations

import pytest

from backend.api import EngineUnavailable, ErrorCode, Request, Response, SamplingConfig, SessionConfig
from backend.core.sequence import Sequence
from backend.core.step import StepOutput
from backend.engine import publish
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


def test_a_defect_met_while_accepting_a_request_ends_that_request_only(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = driver.ask([5], 6)
    monkeypatch.setattr(driver.core.intake, "check", lambda request, resume: 1 // 0)
    hit = driver.ask([6], 6)
    monkeypatch.undo()
    later = driver.ask([7], 6)
    driver.run()
    (response,) = driver.responses[hit]
    assert response.error_code is ErrorCode.INTERNAL and "the engine failed on this request" in response.error_msg
    assert f"the engine failed on request {hit}" in caplog.text and "ZeroDivisionError" in caplog.text
    assert driver.tokens(running) == answer([5], 6) and driver.tokens(later) == answer([7], 6)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_defect_met_while_a_request_is_told_something_ends_that_request_only(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A token, or that its time is over."""
    hit, other = driver.ask([5], 6, timeout_s=1.0), driver.ask([6], 6, timeout_s=100.0)
    if is_late:
        driver.step()
    real = publish.result_response

    def result_response(seq: Sequence, iteration: int, kv_state: bytes | None = None) -> Response:
        if seq.request_id == hit:
            raise KeyError("planted")
        return real(seq, iteration, kv_state)

    monkeypatch.setattr(publish, "result_response", result_response)
    if is_late:
        driver.clock.advance(2.0)
    driver.run()
    assert driver.responses[hit][-1].error_code is ErrorCode.INTERNAL and driver.tokens(other) == answer([6], 6)
    assert driver.used_blocks == 0


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_a_defect_met_by_a_command_ends_no_more_than_its_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    other = driver.ask([5], 6)
    with monkeypatch.context() as patched:
        patched.setattr(driver.core.preparation, "waiting_turn", lambda key: 1 // 0)
        if command == "cancel":
            patched.setattr(driver.core, "_finish", lambda *args: 1 // 0)
            driver.core.cancel(other)
        else:
            driver.core.stop_session(99, 1, end=True)
    driver.step()
    driver.run()
    told = driver.responses[other if command == "cancel" else 99]
    assert told[-1].error_code is ErrorCode.INTERNAL
    if command == "stop":
        assert driver.tokens(other) == answer([5], 6)


@pytest.mark.parametrize("timeout_s", [1e308, -1e308, float("inf"), float("nan"), 0.0, -1.0])
def test_a_time_limit_is_checked_before_anything_is_computed_from_it(driver: Driver, timeout_s: float) -> None:
    wrong = driver.ask([5], 2, timeout_s=timeout_s)
    assert driver.responses[wrong][0].error_code is ErrorCode.INVALID_ARGUMENT
    assert f"timeout is {timeout_s} s, allowed is more than 0 to 86400 s" in driver.responses[wrong][0].error_msg
