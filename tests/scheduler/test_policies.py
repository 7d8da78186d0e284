"""The two capacity policies, with NVIDIA's own example, and what happens under pressure."""

from __future__ import annotations

from random import Random

import pytest

from tests.scheduler.runner import Runner

POLICIES = ("guaranteed_no_evict", "max_utilization")


def two_requests_of_10_and_80(policy: str) -> Runner:
    """100 KV tokens in blocks of 10; each request has 10 prompt tokens and 80 to generate."""
    runner = Runner(num_blocks=10, block_size=10, policy=policy)
    for request_id in (0, 1):
        runner.ask(request_id, [request_id * 100 + i for i in range(10)], 80)
    return runner


@pytest.mark.feature("001-25", "003-46", "002-50")
def test_max_utilization_packs_both_pauses_the_second_and_takes_119_iterations() -> None:
    runner = two_requests_of_10_and_80("max_utilization")
    runner.step(41)
    assert runner.iterations_of(0) == runner.iterations_of(1) == list(range(41))
    runner.step()
    (paused,) = runner.core.scheduler.waiting
    assert (paused.request_id, paused.num_tokens, paused.max_output_tokens - paused.num_output_tokens) == (1, 51, 39)
    assert runner.run() == 119
    assert runner.iterations_of(0) == list(range(80))
    assert runner.iterations_of(1) == [*range(41), *range(80, 119)]
    runner.assert_answers()


@pytest.mark.feature("001-25")
def test_a_resumed_sequence_is_told_its_51_tokens_with_its_old_prompt_boundary() -> None:
    runner = two_requests_of_10_and_80("max_utilization")
    runner.run()
    (row,), (new_row,) = runner.trace[80].rows, runner.trace[80].new_rows
    assert row.num_computed + row.num_tokens == 51 and row.samples
    assert new_row.num_prompt_tokens == 10
    assert new_row.token_ids[:51] == runner.prompts[1][0] + runner.expected(1)[:41]


@pytest.mark.feature("001-26")
def test_guaranteed_no_evict_runs_them_one_after_the_other_in_160_iterations() -> None:
    runner = two_requests_of_10_and_80("guaranteed_no_evict")
    assert runner.run() == 160
    assert runner.iterations_of(0) == list(range(80))
    assert runner.iterations_of(1) == list(range(80, 160))
    assert runner.core.counters.pauses_total == 0
    runner.assert_answers()


@pytest.mark.feature("001-26")
@pytest.mark.parametrize("seed", range(20))
def test_guaranteed_no_evict_never_pauses_under_random_load(seed: int) -> None:
    rng = Random(seed)
    window = rng.choice((None, 3, 5))
    runner = Runner(num_blocks=10, block_size=rng.choice((1, 2, 4)), reuse=True, window=window, max_num_tokens=8)
    size = runner.core.kv.block_size
    for request_id in range(12):
        num_prompt = rng.randint(1, 6 * size)
        runner.ask(request_id, [rng.randrange(3) for _ in range(num_prompt)], rng.randint(0, 10 * size - num_prompt))
        runner.step(rng.randint(0, 3))
    runner.run()
    assert runner.core.counters.pauses_total == 0
    runner.assert_answers()


@pytest.mark.feature("001-27", "003-49")
@pytest.mark.parametrize("batching", ["fused", "separate"])
def test_with_a_pool_10_times_too_small_only_latency_changes(batching: str) -> None:
    small, large = (
        Runner(num_blocks=blocks, block_size=2, slots=10, policy="max_utilization", batching=batching)
        for blocks in (12, 120)
    )
    for request_id in range(10):
        for runner in (small, large):
            runner.ask(request_id, [request_id, 7, 7, request_id], 20)
    assert small.run() > large.run()
    assert small.core.counters.pauses_total > 10 and large.core.counters.pauses_total == 0
    assert [small.tokens(i) for i in range(10)] == [large.tokens(i) for i in range(10)]
    small.assert_answers()


@pytest.mark.feature("003-46")
def test_the_last_running_sequence_is_paused_and_at_last_the_one_that_asks() -> None:
    runner = Runner(num_blocks=6, block_size=2, policy="max_utilization")
    for request_id in (0, 1, 2):
        runner.ask(request_id, [request_id], 9)
    victims = []
    while runner.core.has_work:
        before = [seq.request_id for seq in runner.core.scheduler.running]
        runner.step()
        after = [seq.request_id for seq in runner.core.scheduler.running]
        waiting = {seq.request_id for seq in runner.core.scheduler.waiting}
        victims += [(before, request_id) for request_id in before if request_id in waiting]
        assert after == sorted(after)
    assert victims and all(request_id == max(before) or request_id - 1 in before for before, request_id in victims)
    assert victims[0][1] == 2 and 0 not in {request_id for _, request_id in victims}
    runner.assert_answers()


@pytest.mark.feature("003-35")
@pytest.mark.parametrize("policy", POLICIES)
def test_under_pressure_the_earlier_arrival_goes_on(policy: str) -> None:
    runner = Runner(num_blocks=8, block_size=2, slots=8, policy=policy)
    for request_id in range(6):
        runner.ask(request_id, [request_id, 5], 8)
    runner.run()
    ends = [runner.iterations_of(request_id)[-1] for request_id in range(6)]
    assert ends == sorted(ends)
    assert runner.iterations_of(0) == list(range(8)), "the oldest never waits"
    runner.assert_answers()


@pytest.mark.feature("003-42", "002-41")
@pytest.mark.parametrize("policy", POLICIES)
def test_when_the_head_must_wait_nobody_behind_it_is_tried(policy: str) -> None:
    runner = Runner(num_blocks=8, block_size=2, policy=policy)
    runner.ask(0, [1] * 8, 4)
    runner.ask(1, [2] * 11, 4)  # fits the pool, not beside request 0
    runner.ask(2, [3], 1)  # would fit at once
    runner.step()
    assert runner.seen[0].running == [0]
    runner.run()
    assert runner.iterations_of(2)[0] >= runner.iterations_of(1)[0] > runner.iterations_of(0)[-1]
    runner.assert_answers()


@pytest.mark.feature("003-41")
def test_what_can_never_fit_is_answered_and_the_next_is_considered_in_the_same_step() -> None:
    runner = Runner(num_blocks=4, block_size=2)
    runner.ask_unchecked(0, [1] * 10, 4)
    runner.ask(1, [2, 2], 3)
    runner.step()
    assert "need 7 KV blocks, the pool has 4 of 2 tokens" in runner.responses[0][0].error_msg
    assert runner.seen[0].running == [1]
    runner.run()
    assert runner.tokens(1) == runner.expected(1)


def test_a_head_that_finds_no_room_although_nothing_runs_fails_instead_of_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from backend.kvcache.plan import Admission, KVPlan

    runner = Runner()
    runner.ask(0, [1], 3)
    monkeypatch.setattr(KVPlan, "admit", lambda *arguments: Admission.LATER)
    runner.step()
    assert runner.responses[0][0].has_error() and not runner.core.has_work
