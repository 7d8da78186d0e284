"""What the workers are told: new rows in full, known rows by their differences, in the order of the flat batch."""

from __future__ import annotations

import pytest

from backend.core.step import Row
from tests.scheduler.runner import Runner


@pytest.mark.feature("003-52", "003-04", "003-38")
def test_a_row_is_told_in_full_once_and_then_by_its_differences() -> None:
    runner = Runner(block_size=4)
    runner.ask(0, [1, 2, 3], 6)
    runner.step(3)
    first, second, third = runner.trace
    (new,) = first.new_rows
    assert (new.slot, new.token_ids[:3], new.num_prompt_tokens, len(new.block_ids)) == (0, [1, 2, 3], 3, 2)
    assert first.rows == [Row(0, 0, 3, True, [])]
    assert second.rows == [Row(0, 3, 1, True, [])] and third.new_rows == second.new_rows == []
    (row,) = third.rows
    assert (row.num_computed, row.num_tokens, row.samples, len(row.new_block_ids)) == (4, 1, True, 1)
    assert new.block_ids == [new.block_ids[0], *row.new_block_ids]  # the worker appends to the table it was given


def test_generation_rows_come_before_context_rows() -> None:
    runner = Runner()
    runner.ask(0, [1], 5)
    runner.ask(1, [2], 5)
    runner.step()
    runner.ask(2, [3] * 9, 1)
    runner.step()
    assert [(row.slot, row.num_tokens) for row in runner.trace[-1].rows] == [(0, 1), (1, 1), (2, 9)]


@pytest.mark.feature("003-45")
def test_with_separate_batches_an_open_prompt_is_finished_before_generation_goes_on() -> None:
    runner = Runner(num_blocks=32, batching="separate", max_num_tokens=8)
    runner.ask(0, [1], 4)
    runner.step(2)
    runner.ask(1, list(range(20)), 2)
    runner.run()
    assert [seen.num_tokens for seen in runner.seen[2:6]] == [{1: 8}, {1: 8}, {1: 4}, {0: 1, 1: 1}]
    runner.assert_answers()


@pytest.mark.feature("003-53")
def test_a_copy_is_ordered_in_the_step_whose_rows_read_it() -> None:
    """The second prompt begins like the first one's block and goes on otherwise: that block's head is copied."""
    runner = Runner(block_size=4, reuse=True)
    runner.ask(0, [1, 2, 3, 4, 5], 3)
    runner.step()
    runner.ask(1, [1, 2, 9, 9, 9], 3)
    runner.step()
    step = runner.trace[-1]
    ((source, destination),), (new,) = step.copies, step.new_rows
    assert new.block_ids[0] == destination != source
    assert runner.seen[-1].num_tokens == {0: 1, 1: 3}
    runner.run()
    runner.assert_answers()


@pytest.mark.feature("001-33")
def test_a_second_request_computes_only_what_is_new() -> None:
    runner = Runner(block_size=4, reuse=True)
    runner.ask(0, [*range(20, 32), 1], 4)
    runner.run()
    runner.ask(1, [*range(20, 32), 2], 4)
    runner.step()
    assert runner.seen[-1].num_tokens == {1: 1}
    assert runner.trace[-1].new_rows[0].block_ids[:3] == runner.trace[0].new_rows[0].block_ids[:3]
    runner.run()
    runner.assert_answers()
    assert runner.core.counters.cached_tokens_total == 12


@pytest.mark.feature("003-64")
def test_one_step_calls_the_workers_once() -> None:
    runner = Runner(slots=4)
    for request_id in range(4):
        runner.ask(request_id, [request_id] * 3, 2)
    runner.step()
    (step,) = runner.trace
    assert [row.slot for row in step.rows] == [0, 1, 2, 3]
    runner.run()
    assert [step.step_id for step in runner.trace] == [0, 1]
    runner.core.step()
    assert len(runner.trace) == 2, "nothing to run, nothing is sent"
