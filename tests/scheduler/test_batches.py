"""What one step holds: who joins, how many tokens, and that neither slots nor the token budget are exceeded."""

from __future__ import annotations

from random import Random

import pytest

from backend.core.sequence import Event, Sequence, Status
from backend.scheduler.plan import StepPlan
from tests.scheduler.runner import Runner


def mixed_load(**scheduler: object) -> Runner:
    """Long and short prompts that arrive while a long stream and each other generate."""
    runner = Runner(num_blocks=64, slots=6, max_num_tokens=16, **scheduler)
    for request_id in range(8):
        runner.ask(request_id, [request_id] * (3 + 7 * (request_id % 3)), 4 + request_id if request_id else 40)
        runner.step(2)
    runner.run()
    return runner


@pytest.mark.feature("001-01")
def test_requests_join_and_leave_at_each_iteration() -> None:
    """Two slots: B ends first, C takes its place at the next iteration while A goes on."""
    runner = Runner(slots=2)
    runner.ask(0, [1, 1], 5)
    runner.ask(1, [2], 2)
    runner.ask(2, [3], 2)
    assert runner.run() == 5
    assert [seen.running for seen in runner.seen] == [[0, 1], [0, 1], [0, 2], [0, 2], [0]]
    runner.assert_answers()


@pytest.mark.feature("001-22")
def test_a_short_request_returns_before_a_long_one_and_nothing_is_padded() -> None:
    runner = Runner(batching="separate")
    runner.ask(0, [1] * 11, 9)
    runner.ask(1, [2] * 3, 2)
    while 1 not in runner.responses:
        runner.step()
    assert 0 not in runner.responses
    runner.run()
    # all tokens but the last sampled one of each request go through the model exactly once
    assert sum(row.num_tokens for step in runner.trace for row in step.rows) == (11 + 8) + (3 + 1)
    runner.assert_answers()


@pytest.mark.feature("001-23")
def test_fused_batches_give_the_same_tokens_with_fewer_steps_than_separate_ones() -> None:
    fused, separate = mixed_load(batching="fused"), mixed_load(batching="separate")
    assert [fused.tokens(i) for i in range(8)] == [separate.tokens(i) for i in range(8)]
    fused.assert_answers()
    assert len(fused.trace) == 40 < len(separate.trace)
    assert any(seen.num_context and seen.num_generation for seen in fused.seen)


@pytest.mark.feature("003-45")
def test_a_separate_step_is_for_prompts_or_for_generation() -> None:
    runner = mixed_load(batching="separate")
    kinds = {(seen.num_context > 0, seen.num_generation > 0) for seen in runner.seen if seen.running}
    assert kinds == {(True, False), (False, True)}


@pytest.mark.feature("001-35")
def test_a_prompt_of_50_in_chunks_of_20_takes_42_iterations_for_40_tokens() -> None:
    runner = Runner(num_blocks=32, max_num_tokens=20)
    runner.ask(0, list(range(50)), 40)
    assert runner.run() == 42
    rows = [row for step in runner.trace for row in step.rows]
    assert [(row.num_computed, row.num_tokens, row.samples) for row in rows[:4]] == [
        (0, 20, False),
        (20, 20, False),
        (40, 10, True),
        (50, 1, True),
    ]
    whole = Runner(num_blocks=32)
    whole.ask(0, list(range(50)), 40)
    assert whole.run() == 40
    assert runner.tokens(0) == whole.tokens(0) == runner.expected(0)


@pytest.mark.feature("001-35")
def test_running_streams_go_on_while_a_long_prompt_is_computed() -> None:
    runner = Runner(num_blocks=32, max_num_tokens=8)
    runner.ask(0, [1], 20)
    runner.step()
    runner.ask(1, list(range(40)), 2)
    runner.step(6)
    assert all(seen.num_tokens == {0: 1, 1: 7} for seen in runner.seen[1:6])
    runner.run()
    runner.assert_answers()


def test_without_chunks_a_prompt_waits_until_it_fits_a_step_as_a_whole() -> None:
    runner = Runner(num_blocks=32, max_num_tokens=8, enable_chunked_context=False)
    runner.ask(0, [1], 4)
    runner.ask(1, [2] * 8, 2)
    runner.run()
    assert runner.iterations_of(1)[0] == 4 and runner.seen[4].num_tokens == {1: 8}
    runner.assert_answers()


def test_equal_progress_shares_the_budget_and_first_come_first_served_does_not() -> None:
    shares = {}
    for policy in ("first_come_first_served", "equal_progress"):
        runner = Runner(num_blocks=32, max_num_tokens=12, chunking_policy=policy)
        runner.ask(0, [1] * 20, 1)
        runner.ask(1, [2] * 20, 1)
        runner.run()
        shares[policy] = runner.seen[0].num_tokens
        runner.assert_answers()
    assert shares == {"first_come_first_served": {0: 12}, "equal_progress": {0: 6, 1: 6}}


@pytest.mark.feature("003-43", "002-50")
@pytest.mark.parametrize("seed", range(10))
def test_no_step_exceeds_max_num_tokens(seed: int) -> None:
    rng = Random(seed)
    runner = Runner(
        num_blocks=40,
        slots=6,
        max_num_tokens=9,
        chunking_policy=rng.choice(("first_come_first_served", "equal_progress")),
    )
    for request_id in range(10):
        runner.ask(request_id, [request_id] * rng.randint(1, 30), rng.randint(1, 8))
        runner.step(rng.randint(0, 2))
    runner.run()
    totals = [sum(row.num_tokens for row in step.rows) for step in runner.trace]
    assert max(totals) == 9
    runner.assert_answers()


@pytest.mark.feature("003-44", "004-02", "002-50")
def test_no_more_sequences_run_than_there_are_slots() -> None:
    runner = Runner(num_blocks=64, slots=3)
    for request_id in range(9):
        runner.ask(request_id, [request_id], 4)
    runner.run()
    assert max(len(seen.running) for seen in runner.seen) == 3
    assert {row.slot for step in runner.trace for row in step.rows} == {0, 1, 2}
    assert runner.core.latest_iteration().max_num_active_requests == 3


@pytest.mark.feature("004-03")
def test_whoever_came_first_takes_the_slot_that_becomes_free() -> None:
    runner = Runner(num_blocks=64, slots=2)
    for request_id, max_tokens in enumerate((6, 2, 3, 2, 1)):
        runner.ask(request_id, [request_id], max_tokens)
    runner.run()
    first = [runner.iterations_of(request_id)[0] for request_id in range(5)]
    assert first == sorted(first) == [0, 0, 2, 5, 6]


@pytest.mark.feature("004-04")
def test_a_slot_is_free_the_moment_its_sequence_ends() -> None:
    runner = Runner(num_blocks=64, slots=1)
    runner.ask(0, [1], 3)
    runner.ask(1, [2], 3)
    runner.step(3)
    assert runner.responses[0][-1].is_final and runner.core.kv.state.slots.num_free == 1
    runner.step()
    assert runner.seen[3].running == [1], "the next request runs in the very next iteration"


@pytest.mark.feature("004-06")
def test_the_batch_that_is_computed_is_as_large_as_the_number_of_live_requests() -> None:
    runner = Runner(num_blocks=64, slots=8)
    for request_id, max_tokens in enumerate((1, 2, 3, 4)):
        runner.ask(request_id, [request_id], max_tokens)
    while runner.core.has_work:
        live = runner.core.num_live
        runner.step()
        assert len(runner.trace[-1].rows) == live
    assert [len(step.rows) for step in runner.trace] == [4, 3, 2, 1]


@pytest.mark.feature("003-52", "003-38")
def test_a_plan_says_who_runs_who_joins_who_pauses_and_who_never_fits() -> None:
    runner = Runner(num_blocks=6, block_size=2, policy="max_utilization")
    runner.ask(0, [1], 9)
    runner.ask(1, [2], 9)
    scheduler = runner.core.scheduler
    plan = scheduler.schedule()
    assert [(seq.request_id, tokens) for seq, tokens in plan.rows] == [(0, 1), (1, 1)] and plan.generation == []
    assert [seq.request_id for seq in plan.admitted] == [0, 1]
    assert (plan.paused, plan.rejected, plan.is_empty) == ([], [], False)
    while not plan.paused:
        runner.step()
        plan = scheduler.schedule()
    assert [seq.request_id for seq in plan.paused] == [1]
    assert [seq.request_id for seq, _ in plan.rows] == [0] and plan.context == []


@pytest.mark.feature("003-52")
def test_a_plan_lists_whom_no_pool_can_hold_apart_from_those_it_runs() -> None:
    runner = Runner(num_blocks=4, block_size=2)
    runner.ask_unchecked(0, [1] * 10, 4)
    runner.ask(1, [2, 2], 3)
    plan = runner.core.scheduler.schedule()
    assert [seq.request_id for seq in plan.rejected] == [0]
    assert [(seq.request_id, tokens) for seq, tokens in plan.rows] == [(1, 2)]
    assert [seq.request_id for seq in plan.admitted] == [1] and not plan.is_empty


@pytest.mark.feature("003-52")
def test_all_that_qserve_s_scheduler_outputs_tell_is_told_by_the_plan_and_its_step() -> None:
    """Two prompts begin alike, so that a block is copied; later both generate, and one is paused. Nothing is ever swapped."""
    runner = Runner(num_blocks=7, block_size=4, reuse=True, policy="max_utilization")
    scheduler = runner.core.scheduler
    runner.ask(0, [1, 2, 3, 4, 5, 6], 3)
    runner.run()
    runner.ask(1, [1, 2, 3, 4, 5, 9], 12)
    runner.ask(2, [7, 8], 12)
    runner.ask_unchecked(3, [3] * 40, 4)
    prompts: list[bool] = []
    copies: list[tuple[int, int]] = []
    ignored, swapped, num_paused = set(), set(), 0
    while runner.core.has_work:
        plan = scheduler.schedule()
        scheduled = [(seq.request_id, num_tokens) for seq, num_tokens in plan.rows]
        prompts.append(bool(plan.context))
        ignored |= {seq.request_id for seq in plan.rejected}
        swapped |= {name for name in dir(plan) if "swap" in name}
        num_paused += len(plan.paused)
        before = len(runner.trace)
        runner.step()
        for step in runner.trace[before:]:
            assert len(step.rows) == len(scheduled)
            assert sum(row.num_tokens for row in step.rows) == sum(tokens for _, tokens in scheduled)
            copies += step.copies
    assert ignored == {3} and not swapped and num_paused > 0
    assert prompts[0] and not all(prompts), "prompt_run"
    assert len(copies) == 1 and copies[0][0] != copies[0][1], "blocks_to_copy"


@pytest.mark.feature("003-34")
def test_a_sequence_is_in_one_queue_or_in_none() -> None:
    runner = Runner(num_blocks=8, block_size=2, slots=3, policy="max_utilization")
    for request_id in range(6):
        runner.ask(request_id, [request_id, 1], 8)
    statuses = set()
    while runner.core.has_work:
        running, waiting = runner.core.scheduler.running, list(runner.core.scheduler.waiting)
        assert not {seq.seq_id for seq in running} & {seq.seq_id for seq in waiting}
        assert len({seq.seq_id for seq in (*running, *waiting)}) == len(running) + len(waiting) == runner.core.num_live
        statuses |= {seq.status for seq in waiting}
        runner.step()
    assert statuses == {Status.WAITING, Status.PAUSED}


@pytest.mark.feature("003-36")
def test_a_new_request_goes_last_in_line() -> None:
    runner = Runner()
    for request_id in (5, 3, 4):
        runner.ask(request_id, [1], 2)
    waiting = runner.core.scheduler.waiting
    assert [seq.request_id for seq in waiting] == [5, 3, 4]
    assert waiting.head.request_id == 5 and waiting.num_tokens == 3


@pytest.mark.feature("003-37", "003-28")
@pytest.mark.parametrize("state", [Status.WAITING, Status.RUNNING, Status.PAUSED])
def test_cancelling_takes_a_sequence_out_of_every_queue_and_frees_its_blocks(state: Status) -> None:
    runner = Runner(num_blocks=6, block_size=2, slots=2, policy="max_utilization")
    for request_id in range(3):
        runner.ask(request_id, [request_id], 9)
    victim = _run_until(runner, state)
    held = runner.core.kv.state.blocks.num_active
    own = len(runner.core.kv.state.tables[victim.seq_id].handles) if state is Status.RUNNING else 0
    runner.core.cancel(victim.request_id)
    (response,) = runner.core.take_responses()
    assert response.result.finish_reasons[0].name == "CANCELLED"
    assert runner.core.kv.state.blocks.num_active == held - own
    assert victim.seq_id not in runner.core.kv.state.tables and victim.status is Status.RETIRED
    runner.core.check_integrity()
    runner.run()
    del runner.prompts[victim.request_id]
    runner.assert_answers()


@pytest.mark.feature("003-37")
def test_cancelling_an_unknown_request_changes_nothing() -> None:
    runner = Runner()
    runner.ask(0, [1], 2)
    runner.core.cancel(77)
    assert runner.core.take_responses() == [] and runner.core.num_live == 1


def _run_until(runner: Runner, state: Status) -> Sequence:
    """Step until some sequence is in `state` behind others; returns it."""
    while True:
        runner.step()
        found = [seq for seq in (*runner.core.scheduler.waiting, *runner.core.scheduler.running) if seq.status is state]
        if found:
            return found[-1]


def test_a_plan_that_is_dropped_changes_nothing() -> None:
    """Scheduling twice gives the same plan, whatever state the engine is in."""
    runner = Runner(num_blocks=8, block_size=2, slots=3, policy="max_utilization", reuse=True)
    for request_id in range(8):
        runner.ask(request_id, [1, 2, request_id % 3], 7)
    while runner.core.has_work:
        before = _snapshot(runner)
        plans = [runner.core.scheduler.schedule() for _ in range(2)]
        assert _describe(plans[0]) == _describe(plans[1])
        assert _snapshot(runner) == before
        runner.step()
    runner.assert_answers()


def _describe(plan: StepPlan) -> tuple[object, ...]:
    grants = [
        (key, grant.num_new, grant.computed, grant.kept, grant.copy_from) for key, grant in plan.kv.grants.items()
    ]
    return [(seq.seq_id, tokens) for seq, tokens in plan.rows], [seq.seq_id for seq in plan.paused], grants


def _snapshot(runner: Runner) -> tuple[object, ...]:
    kv, scheduler = runner.core.kv, runner.core.scheduler
    blocks = [(block.ref_count, block.unique_id, block.is_shareable) for block in kv.state.blocks.blocks]
    records = {key: (list(record.handles), record.is_locked, record.depth) for key, record in kv.state.tables.items()}
    sequences = [repr(seq) for seq in (*scheduler.running, *scheduler.waiting)]
    return blocks, records, sequences, list(kv.state.blocks._cached), kv.state.slots.num_free, len(kv.state.trie)


def test_a_plan_does_not_survive_an_illegal_transition() -> None:
    runner = Runner()
    runner.ask(0, [1], 2)
    seq = runner.core.scheduler.waiting.head
    with pytest.raises(RuntimeError, match="pause is not allowed"):
        seq.apply(Event.PAUSE)
    assert seq.status is Status.WAITING
    runner.run()
    runner.assert_answers()
