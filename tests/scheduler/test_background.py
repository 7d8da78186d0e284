"""Requests of priority 0 run in what all others leave, and say what they would have said alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from backend.api import Request
from backend.api.config.schema import LimitsConfig
from backend.api.request import BACKGROUND
from backend.core.sequence import Sequence
from backend.scheduler.background import QUIET_S, Background, cut_background
from backend.scheduler.plan import StepPlan
from tests.engine.driver import Driver
from tests.scheduler.runner import Runner


def background(runner: Runner, count: int, prompt: int = 3, output: int = 12) -> None:
    for number in range(count):
        runner.ask(number, [number + 1] * prompt, output, priority=BACKGROUND)


def test_they_wait_while_others_run_and_lose_neither_slot_nor_kv() -> None:
    runner = Runner(background_share=0.0)
    background(runner, 2)
    runner.step(3)
    runner.ask(10, [50, 51], 5)
    runner.run()
    runner.assert_answers()
    assert runner.iterations_of(10) == [3, 4, 5, 6, 7], "it comes at once"
    assert {0, 1} & set(range(3, 8)).intersection(runner.iterations_of(0)) == set()
    assert runner.core.counters.pauses_total == 0


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("blocks", [64, 9])
def test_whoever_finds_no_slot_or_block_gets_theirs(policy: str, blocks: int) -> None:
    """Four slots, or nine blocks, are taken."""
    runner = Runner(num_blocks=blocks, slots=4, policy=policy, background_share=0.0)
    background(runner, 6, prompt=4, output=8)
    runner.step(4)
    for number in range(10, 12):
        runner.ask(number, [number] * 6, 8)
    runner.step(3)
    assert {10, 11} <= set(runner.seen[-1].running)
    runner.run()
    runner.assert_answers()


def test_others_that_are_paused_come_back_before_them() -> None:
    """Two of seven blocks' need outgrow the pool; a background request has come meanwhile."""
    runner = Runner(num_blocks=7, slots=4, policy="max_utilization", background_share=0.0)
    runner.ask(10, [1] * 6, 12)
    runner.ask(11, [2] * 6, 12)
    background(runner, 1)
    runner.run()
    runner.assert_answers()
    assert max(runner.iterations_of(11)) < min(runner.iterations_of(0))


def test_random_mixtures_end_and_say_the_same() -> None:
    dice = random.Random(5)
    for _ in range(40):
        policy = dice.choice(["guaranteed_no_evict", "max_utilization"])
        chunking = dice.choice(["first_come_first_served", "equal_progress"])
        runner = Runner(
            *(dice.randint(8, 24), 4, dice.randint(1, 4)),
            **{"policy": policy, "chunking_policy": chunking, "reuse": dice.random() < 0.5, "max_num_tokens": 8},
        )
        for number in range(dice.randint(2, 12)):
            prompt = [dice.randrange(1, 3)] * dice.randint(1, 14)
            runner.ask(number, prompt, dice.randint(1, 10), priority=dice.choice([BACKGROUND, BACKGROUND, 0.5, 0.9]))
            runner.step(dice.randint(0, 3))
        runner.run()
        runner.assert_answers()


def test_they_fill_half_of_the_queue_and_take_no_place_of_others() -> None:
    driver = Driver(limits=LimitsConfig(max_queue_size=8), slots=1)
    for number in range(8):
        driver.core.enqueue(number, Request([1, 2], 4, priority=BACKGROUND))
    refused = [response for response in driver.core.take_responses() if response.error_or_none]
    assert len(refused) == 4 and "Maximum queue size of 4 is reached" in str(refused[0].error_or_none)
    for number in range(10, 18):
        driver.core.enqueue(number, Request([1, 2], 4))
    assert not driver.core.take_responses()


def ridden(policy: Background, count: int, seconds: Callable[[int], float]) -> list[int]:
    """Background tokens of so many steps beside two rows of others. `seconds`: of a step with so many tokens."""
    policy.num_live, rooms = 1, []
    for _ in range(count):
        rooms.append(policy.room(2, others_wait=False))
        policy.note_step(step(2, rooms[-1]), seconds(2 + rooms[-1]))
    assert policy.room(2, others_wait=True) == 0
    return rooms


def test_where_rows_cost_nothing_ever_more_run_beside_others() -> None:
    """As on a GPU, whose steps wait for weights. Each size is tried before a larger one."""
    rooms = ridden(Background(0.05), 60, lambda count: 0.01)
    assert rooms[-1] >= 64 and all(later <= max(1, 2 * earlier) for earlier, later in pairwise(rooms))


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_where_rows_cost_something_others_pay_their_share_and_no_more(share: float) -> None:
    rooms = ridden(Background(share), 400, lambda count: 0.010 + 0.002 * count)
    longer = sum(0.002 * room for room in rooms) / (400 * 0.014)
    assert share / 2 <= longer <= share + 0.01 and max(rooms) <= 2


def test_a_step_that_took_far_longer_than_expected_is_paid_for() -> None:
    policy = Background(0.05)
    ridden(policy, 20, lambda count: 0.01)
    assert ridden(policy, 1, lambda count: 0.1) != [0]
    assert sum(ridden(policy, 100, lambda count: 0.01)) == 0


def test_all_of_them_run_when_nobody_else_has_for_a_while() -> None:
    policy = Background(0.05)
    assert policy.room(0, others_wait=False) is None, "nobody has come yet"
    policy.note_plan(step(1), 1)
    for count in (1, 2, 4, 8, 16):
        policy.note_step(step(count), 0.01 + 0.002 * count)
    assert policy.room(0, others_wait=False) == 4, "a step of four takes less than twice as long as one of one"
    policy.num_live = 1
    policy.note_plan(step(0, 4), int(QUIET_S * 1e9) + 2)
    assert policy.room(0, others_wait=False) is None


def test_a_prompt_that_is_not_cut_runs_whole_and_the_first_one_always() -> None:
    rows = [sequence(1), sequence(2), sequence(3, BACKGROUND), sequence(4, BACKGROUND)]
    plan = step(0)
    plan.background_room = 4
    assert cut_background(rows[2:], [9, 9], plan, is_chunked=True) == [4, 0]
    assert cut_background(rows[2:], [9, 9], plan, is_chunked=False) == [9, 0]
    plan.background_room = 0
    assert cut_background(rows, [9, 9, 9, 9], plan, is_chunked=False) == [9, 9, 0, 0]


def sequence(number: int, priority: float = 0.5) -> Sequence:
    return Sequence(number, number, Request([1], 1, priority=priority), number, 0)


def step(num_others: int, num_background: int = 0) -> StepPlan:
    """A step that only generates."""
    plan = StepPlan.__new__(StepPlan)
    plan.context, plan.drafts = [], {}
    rows = [sequence(number) for number in range(num_others)]
    plan.generation = rows + [sequence(number, BACKGROUND) for number in range(num_background)]
    return plan
