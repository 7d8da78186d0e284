"""A row that fails alone, one step at a time and looking ahead: its request ends, its step mates go on, nothing leaks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from backend.core.step import StepOutput
from tests.engine.driver import Driver, answer
from tests.fakes.hash_worker import HashWorkerGroup


def fail_slot(workers: HashWorkerGroup, slot: int, after: int) -> None:
    """From then on, let the row of `slot` fail in one step: the `after`-th that is collected and has it."""
    collect, seen = workers.collect, [0]

    def collect_and_fail() -> StepOutput:
        output = collect()
        step = next(step for step in reversed(workers.trace) if step.step_id == output.step_id)
        index = next((i for i, row in enumerate(step.rows) if row.slot == slot), None)
        seen[0] += index is not None
        return replace(output, failed=[(index, "it failed")]) if index is not None and seen[0] == after else output

    workers.collect = collect_and_fail


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_failed_row_ends_its_request_and_no_other(looks_ahead: bool, after: int) -> None:
    driver = Driver(looks_ahead=looks_ahead)
    wrong, right = driver.ask([1, 2, 3], 8), driver.ask([4, 5], 8)
    fail_slot(driver.workers, 0, after)
    driver.run()
    *parts, error = driver.responses[wrong]
    assert [t for part in parts for t in part.result.output_token_ids[0]] == answer([1, 2, 3], 8)[: after - 1]
    assert error.error_msg == "it failed"
    assert driver.tokens(right) == answer([4, 5], 8)
    assert driver.used_blocks == 0
    again = driver.ask([1, 2, 3], 4)
    driver.run()
    assert driver.tokens(again) == answer([1, 2, 3], 4)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_failed_turn_leaves_the_session_as_it_was(looks_ahead: bool) -> None:
    driver = Driver(looks_ahead=looks_ahead)
    driver.turn(7, [1, 2, 3], 4, start=True)
    driver.run()
    log = driver.log(7)
    fail_slot(driver.workers, driver.workers.trace[-1].rows[0].slot, 2)
    wrong = driver.turn(7, [9], 4)
    driver.run()
    assert "it failed" in driver.responses[wrong][-1].error_msg
    assert driver.log(7) == log
    driver.workers.collect = HashWorkerGroup.collect.__get__(driver.workers)
    right = driver.turn(7, [9], 4)
    driver.run()
    assert driver.tokens(right) == answer([*log, 9], 4, counter=4)
