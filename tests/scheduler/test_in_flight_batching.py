"""Batches whose members change from step to step: who is in which step, exactly, and who is too long for any."""

from __future__ import annotations

import pytest

from tests.scheduler.runner import Runner


@pytest.mark.feature("002-42")
def test_requests_join_and_leave_a_batch_that_goes_on() -> None:
    """Document 002's example: 4 joins in step 2, 1 has left in step 3, 5 joins in step 4."""
    runner = Runner(num_blocks=64)
    runner.ask(1, [1], 3)
    runner.ask(2, [2], 6)
    runner.ask(3, [3], 6)
    runner.step(2)
    runner.ask(4, [4], 6)
    runner.step(2)
    runner.ask(5, [5], 6)
    runner.step()
    assert [set(seen.running) for seen in runner.seen] == [{1, 2, 3}, {1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4}, {2, 3, 4, 5}]
    runner.run()
    runner.assert_answers()


@pytest.mark.feature("002-40", "002-41")
def test_a_batch_is_filled_up_to_its_tokens_and_its_rows_and_refilled_once_somebody_has_ended() -> None:
    """4 rows, 12 tokens, prompts of 5 in one piece: 2 join, then 2 more beside them, the others as these end."""
    runner = Runner(num_blocks=64, slots=4, max_num_tokens=12, enable_chunked_context=False)
    for request_id in range(6):
        runner.ask(request_id, [request_id] * 5, 3)
    runner.run()
    assert [seen.running for seen in runner.seen] == [
        [0, 1],
        [0, 1, 2, 3],
        [0, 1, 2, 3],  # the rows are all taken
        [2, 3, 4, 5],  # those that ended have left before the others are counted
        [4, 5],
        [4, 5],
    ]
    assert [sum(seen.num_tokens.values()) for seen in runner.seen] == [10, 12, 4, 12, 2, 2]
    runner.assert_answers()


@pytest.mark.feature("002-41", "002-40")
def test_a_head_too_large_for_this_step_is_not_overtaken_by_a_small_one() -> None:
    runner = Runner(num_blocks=64, max_num_tokens=12, enable_chunked_context=False)
    runner.ask(0, [1] * 5, 2)
    runner.ask(1, [2] * 11, 1)
    runner.ask(2, [3], 1)
    runner.run()
    assert [seen.running for seen in runner.seen] == [[0], [0, 1], [2]]
    runner.assert_answers()


@pytest.mark.feature("003-40")
@pytest.mark.parametrize(("length", "is_served"), [(12, True), (13, False)])
def test_without_chunks_a_prompt_that_no_step_holds_is_refused_and_not_scheduled(length: int, is_served: bool) -> None:
    runner = Runner(num_blocks=64, max_num_tokens=12, enable_chunked_context=False)
    runner.ask(0, [1] * length, 3)
    assert (0 in runner.responses) is not is_served, "refused before any step"
    if not is_served:
        (response,) = runner.responses[0]
        assert "the prompt has 13 tokens, the limit is 12 (scheduler.max_num_tokens" in response.error_msg
        assert not runner.core.has_work
        del runner.prompts[0]
    runner.ask(1, [2] * 4, 3)
    runner.run()
    runner.assert_answers()


@pytest.mark.feature("003-40")
def test_with_chunks_a_prompt_may_be_longer_than_a_step() -> None:
    runner = Runner(num_blocks=64, max_num_tokens=12)
    runner.ask(0, [1] * 30, 3)
    runner.run()
    runner.assert_answers()


def test_without_chunks_what_was_paused_returns_though_it_has_outgrown_a_step() -> None:
    runner = Runner(
        num_blocks=6, block_size=4, max_num_tokens=8, enable_chunked_context=False, policy="max_utilization"
    )
    runner.ask(0, [1] * 7, 14)
    runner.ask(1, [2] * 7, 14)
    runner.run()
    assert runner.core.counters.pauses_total > 0
    assert max(row.num_computed + row.num_tokens for step in runner.trace for row in step.rows) > 8
    runner.assert_answers()
