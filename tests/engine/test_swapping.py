"""Preemption by swapping: KV of paused sequences moves to host memory and comes back; nothing of it is computed again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backend.api import SamplingConfig
from backend.api.errors import ConfigError
from backend.core.sequence import Sequence
from backend.core.step import StepInput
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.plan import Admission, KVPlan
from backend.scheduler.plan import StepPlan
from tests.engine.driver import Driver, answer

PLACE = 4096  # bytes that a block of 4 tokens takes in the fake model
FIRST, SECOND = list(range(100, 110)), list(range(200, 210))


def swapping(num_places: int = 100, pool_tokens: int = 40, **options: Any) -> Driver:
    kv_cache = {"swap_bytes": num_places * PLACE} | options.pop("kv_cache", {})
    made = {"policy": "max_utilization", "preemption": "swap", "pool_tokens": pool_tokens, "kv_cache": kv_cache}
    return Driver(**made | options)


def pushed_out(driver: Driver, **fields: Any) -> tuple[int, int]:
    """Two requests that together outgrow the pool: the second one is paused, and the first one evicts its KV."""
    first, second = driver.ask(FIRST, 26), driver.ask(SECOND, 16, **fields)
    return first, second


def until_paused(driver: Driver) -> None:
    for _ in range(100):
        driver.step()
        if driver.core.scheduler.waiting.num_paused:
            return
    raise AssertionError("nothing is ever paused")


def swaps(driver: Driver) -> list[StepInput]:
    return [step for step in driver.workers.trace if step.swap_out or step.swap_in]


@pytest.mark.feature("003-32", "003-30", "003-33")
def test_kv_of_a_paused_sequence_comes_back_and_nothing_is_computed_again() -> None:
    driver = swapping()
    first, second = pushed_out(driver)
    driver.run()
    assert driver.tokens(first) == answer(FIRST, 26) and driver.tokens(second) == answer(SECOND, 16)
    counters = driver.core.counters
    assert counters.pauses_total == 1 and counters.recomputed_tokens_total == 0
    out, back = swaps(driver)
    assert out.swap_out and not out.swap_in and back.swap_in and not back.swap_out
    places = {place for _, place in out.swap_out}
    assert len(places) == len(out.swap_out) == len({block for block, _ in out.swap_out})
    assert {place for _, place in back.swap_in} <= places, "what is still cached in the pool stays there"
    assert driver.core.kv.state.swap.num_free == 100, "every place is free again"


@pytest.mark.feature("003-33")
def test_without_swapping_the_same_is_computed_again() -> None:
    driver = swapping(preemption="recompute")
    first, second = pushed_out(driver)
    driver.run()
    assert driver.tokens(first) == answer(FIRST, 26) and driver.tokens(second) == answer(SECOND, 16)
    assert driver.core.counters.recomputed_tokens_total > 0 and not swaps(driver)


@pytest.mark.feature("003-32")
def test_blocks_that_a_running_sequence_shares_stay_where_they_are() -> None:
    driver = swapping(sharing="all")
    shared = list(range(100, 109))
    first = driver.ask(shared, 27)
    driver.step()
    second = driver.ask([*shared, 7], 16)
    driver.run()
    assert driver.tokens(second) == answer([*shared, 7], 16) and driver.tokens(first) == answer(shared, 27)
    (out, *_) = swaps(driver)
    prefix = driver.workers.trace[0].new_rows[0].block_ids[:2]
    assert not set(prefix) & {block for block, _ in out.swap_out}


@pytest.mark.feature("003-31")
@pytest.mark.parametrize(("num_blocks", "can"), [(4, True), (5, False)])
def test_a_swap_out_needs_a_place_for_each_block(num_blocks: int, can: bool) -> None:
    assert swapping(num_places=4).core.kv.state.swap.can_swap_out(num_blocks) is can


@pytest.mark.feature("003-51")
def test_without_room_on_the_host_the_request_ends_with_an_error_and_others_go_on() -> None:
    driver = swapping(num_places=3)
    first, second = pushed_out(driver)
    driver.run()
    message = driver.responses[second][-1].error_msg
    assert "do not fit into the 3 of 3 that are free in host memory; raise kv_cache.swap_bytes" in message
    assert driver.tokens(first) == answer(FIRST, 26)
    driver.core.check_integrity()
    third = driver.ask([5, 6], 4)
    driver.run()
    assert driver.tokens(third) == answer([5, 6], 4) and driver.core.kv.state.swap.num_free == 3


@pytest.mark.feature("003-39", "003-71")
@pytest.mark.parametrize("slots", [2, 4])
def test_a_swapped_sequence_comes_before_what_waits_and_takes_no_more_slots_than_there_are(slots: int) -> None:
    driver = swapping(slots=slots)
    first, second = pushed_out(driver)
    until_paused(driver)
    third = driver.ask([1, 2], 2)
    while driver.core.has_work:
        driver.step()
        running = {seq.request_id for seq in driver.core.scheduler.running}
        assert len(running) <= slots
        if driver.core.scheduler.waiting.num_paused:
            assert third not in running, "a new prompt runs although a swapped sequence waits"
    assert driver.tokens(second) == answer(SECOND, 16) and driver.tokens(third) == answer([1, 2], 2)


def all_swapped(count: int, **options: Any) -> tuple[Driver, list[int]]:
    """So many requests, with different numbers of tokens to come, all of which are swapped out in one step."""
    driver = swapping(pool_tokens=400, slots=count, **options)
    requests = [driver.ask([10 * n + 1, 2, 3], 4 + 2 * n) for n in range(count)]
    driver.step(2)
    plan = StepPlan(driver.core.kv.plan())
    for seq in reversed(driver.core.scheduler.running):
        plan.kv.pause(seq)
    driver.core.workers.submit(driver.core.scheduler.commit(plan, step_id=-1, now_ns=0))
    driver.core.workers.collect()
    assert driver.core.scheduler.waiting.num_paused == count
    return driver, requests


@pytest.mark.feature("003-71")
def test_of_swapped_sequences_as_many_come_back_as_there_are_slots() -> None:
    driver, _ = all_swapped(4)
    plan, admitted = driver.core.kv.plan(), []
    plan.free_slots = 2
    for seq in driver.core.scheduler.waiting:
        admitted.append(driver.core.scheduler._capacity.admit(plan, seq, [], []))
    assert admitted == [Admission.NOW, Admission.NOW, Admission.LATER, Admission.LATER]


@pytest.mark.feature("003-71")
def test_a_third_swapped_sequence_waits_until_one_of_two_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run are always the first two, in the order of arrival, that have not ended."""
    driver, requests = all_swapped(4)
    monkeypatch.setattr(driver.core.scheduler._tuner, "max_sequences", lambda *_: 2)
    left, ends = list(requests), []
    while driver.core.has_work:
        driver.step()
        running = [seq.request_id for seq in driver.core.scheduler.running]
        ends += [request for request in left if driver.responses[request][-1].is_final]
        left = [request for request in left if request not in ends]
        assert running == left[: len(running)] and len(running) <= 2
        assert len(running) >= min(2, len(left)) - 1, "a place is taken in the step after an end"
    assert ends == requests and driver.core.counters.recomputed_tokens_total == 0
    for n, request in enumerate(requests):
        assert driver.tokens(request) == answer([10 * n + 1, 2, 3], 4 + 2 * n)


@pytest.mark.feature("003-71")
def test_what_can_never_run_is_answered_without_a_step_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """QServe's scheduler returns early when it has only ignored something; the next call schedules the rest."""
    driver = swapping(pool_tokens=400)
    admit = driver.core.scheduler._capacity.admit
    ignored = driver.ask([1, 2, 3], 4)

    def never(plan: KVPlan, seq: Sequence, *others: Any) -> Admission:
        return Admission.NEVER if seq.request_id == ignored else admit(plan, seq, *others)

    monkeypatch.setattr(driver.core.scheduler._capacity, "admit", never)
    driver.step()
    assert driver.error(ignored) and not driver.workers.trace and not driver.core.has_work
    last = driver.ask([4, 5], 3)
    driver.run()
    assert driver.tokens(last) == answer([4, 5], 3) and driver.used_blocks == 0


@pytest.mark.feature("003-29")
@pytest.mark.parametrize("watermark", [0, 2])
def test_a_swap_in_needs_all_blocks_and_one_more_above_the_watermark(watermark: int) -> None:
    driver = swapping(pool_tokens=44, kv_cache={"watermark": 0.09 * watermark + 0.01})
    pushed_out(driver)
    until_paused(driver)
    (seq,) = driver.core.scheduler.waiting
    needed = -(-seq.num_tokens // 4) + 1 + watermark
    plan = driver.core.kv.plan()
    for available, admission in ((needed - 1, Admission.LATER), (needed, Admission.NOW)):
        assert driver.core.scheduler.running, "the watermark counts beside others"
        plan.available = available
        mark = plan.mark()
        assert driver.core.scheduler._capacity.admit(plan, seq, driver.core.scheduler.running, []) is admission
        plan.rollback(mark)


@pytest.mark.feature("003-47", "003-48")
def test_no_step_that_pauses_swaps_in() -> None:
    driver = swapping(pool_tokens=48)
    prompts = [[50 * n + m for m in range(6)] for n in range(1, 6)]
    requests = [driver.ask(prompt, 20 + 3 * n) for n, prompt in enumerate(prompts)]
    driver.run()
    for n, (request, prompt) in enumerate(zip(requests, prompts)):
        assert driver.tokens(request) == answer(prompt, 20 + 3 * n)
    assert len(swaps(driver)) > 4 and driver.core.counters.recomputed_tokens_total == 0
    assert not any(step.swap_out and step.swap_in for step in driver.workers.trace)


@pytest.mark.feature("003-52", "003-30")
def test_the_maps_of_swapping_travel_with_the_step() -> None:
    step = StepInput(0, [], swap_out=[(1, 2)], swap_in=[(3, 4)])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepInput)
    assert (again.swap_out, again.swap_in, again.copies) == ([(1, 2)], [(3, 4)], [])
    assert (
        StepInFlight(None, StepInput(0, [], swap_out=[(1, 2)]), 0).has_work
        and not StepInFlight(None, StepInput(0, []), 0).has_work
    )


@pytest.mark.feature("003-50", "003-30")
def test_rows_of_beams_are_swapped_together_and_what_they_share_moves_once() -> None:
    def run(pool_tokens: int) -> tuple[list[list[list[int]]], Driver]:
        driver = swapping(pool_tokens=pool_tokens)
        beams = SamplingConfig(beam_width=2)
        asked = [
            driver.ask(prompt, num_outputs, streaming=False, sampling_config=beams)
            for prompt, num_outputs in ((FIRST, 30), (SECOND, 30))
        ]
        driver.run()
        return [driver.responses[each][-1].result.output_token_ids for each in asked], driver

    expected, _ = run(400)
    num_shared = num_twice = 0
    for pool_tokens in (80, 88, 96):
        found, driver = run(pool_tokens)
        assert found == expected and driver.core.counters.recomputed_tokens_total == 0
        out, back = swaps(driver)[:2]
        assert out.swap_out and back.swap_in
        for pairs in (out.swap_out, back.swap_in):
            assert len({block for block, _ in pairs}) == len(pairs)
        num_twice += len(back.swap_in) - len({place for _, place in back.swap_in})
        rows = [row for row in back.new_rows if row.token_ids[:10] == SECOND]
        held = [block for row in rows for block in row.block_ids]
        num_shared += len(held) - len(set(held))
    assert num_twice == 0, "a block comes back twice"
    assert num_shared > 0, "the rows have lost what they shared"


def test_a_request_that_is_cancelled_while_it_is_swapped_leaves_no_place_behind() -> None:
    driver = swapping()
    first, second = pushed_out(driver)
    until_paused(driver)
    assert driver.core.kv.state.swap.num_free < 100
    driver.core.cancel(second)
    assert driver.core.kv.state.swap.num_free == 100
    driver.run()
    assert driver.tokens(first) == answer(FIRST, 26)


def test_a_failed_step_loses_what_is_swapped_and_it_is_computed_again() -> None:
    driver = swapping()
    first, second = pushed_out(driver)
    until_paused(driver)
    driver.workers.fail_next = RuntimeError("planted")
    driver.run()
    assert "model step failed" in driver.responses[first][-1].error_msg
    assert driver.tokens(second) == answer(SECOND, 16) and driver.core.counters.recomputed_tokens_total > 0
    assert driver.core.kv.state.swap.num_free == 100


def test_swapping_without_memory_for_it_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="kv_cache.swap_bytes is 4095, while one block takes 4096; raise it"):
        swapping(kv_cache={"swap_bytes": PLACE - 1})
