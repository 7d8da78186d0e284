"""Weights of namespaces, the bound on overtaking, and room in the queue beside somebody who fills it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import ConfigError, Request, load_config
from backend.api.config.schema import LimitsConfig
from backend.core.sequence import Sequence
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.shares import RECENT
from tests.engine.driver import Driver


def asked(number: int, namespace: str = "", priority: float = 0.5) -> Sequence:
    return Sequence(number, number, Request([1], 1, cache_salt=namespace, priority=priority), number, 0)


def admit(queue: WaitingQueue) -> Sequence:
    head = queue.head
    assert head is not None
    queue.take(head)
    return head


def test_a_namespace_takes_as_many_turns_as_its_weight() -> None:
    queue = WaitingQueue({"gold": 3})
    for number in range(12):
        queue.append(asked(number, "gold"))
        queue.append(asked(100 + number, "iron"))
    order = [admit(queue).request.cache_salt for _ in range(12)]
    assert order == ["gold", "gold", "gold", "iron"] * 3


def test_weights_hold_beside_a_namespace_that_never_stops() -> None:
    queue, order = WaitingQueue({"gold": 4}), []
    for number in range(400):
        queue.append(asked(number, "flood"))
        queue.append(asked(1000 + number, "gold"))
        order.append(admit(queue).request.cache_salt)
    assert Counter(order[100:]) == {"gold": 240, "flood": 60}


def test_a_lower_priority_comes_once_in_so_many_admissions() -> None:
    queue, order = WaitingQueue(max_overtakes=5), []
    for number in range(3):
        queue.append(asked(number, priority=0.1))
    for number in range(10, 40):
        queue.append(asked(number, priority=0.9))
        order.append(admit(queue).request.priority)
    assert [index for index, priority in enumerate(order) if priority == 0.1] == [5, 11, 17]


def test_zero_leaves_no_way_past_a_higher_priority() -> None:
    queue = WaitingQueue(max_overtakes=0)
    queue.append(asked(1, priority=0.1))
    for number in range(10, 500):
        queue.append(asked(number, priority=0.9))
        assert admit(queue).request.priority == 0.9


@given(st.integers(0, 1 << 30))
def test_a_plan_sees_the_order_in_which_sequences_will_be_taken(seed: int) -> None:
    dice = random.Random(seed)
    queue = WaitingQueue({"a": dice.randint(1, 4), "b": dice.randint(1, 4)}, dice.randint(0, 4))
    number = 0
    for _ in range(dice.randint(1, 8)):
        for _ in range(dice.randint(1, 10)):
            number += 1
            queue.append(asked(number, dice.choice("abc"), dice.choice((0.1, 0.5, 0.5, 0.9))))
        expected = list(queue)[: dice.randint(0, 5)]
        assert [admit(queue) for _ in expected] == expected


@given(st.integers(0, 1 << 30), st.integers(1, 6))
def test_nobody_is_overtaken_more_often_than_the_bound_times_the_priorities(seed: int, bound: int) -> None:
    dice = random.Random(seed)
    priorities = (0.1, 0.3, 0.5, 0.9)
    queue = WaitingQueue(max_overtakes=bound)
    first = asked(0, priority=0.1)
    queue.append(first)
    for number in range(1, 200):
        for _ in range(2):
            queue.append(asked(2 * number + _, priority=dice.choice(priorities[1:])))
        if admit(queue) is first:
            break
    assert number <= bound + len(priorities)


def test_whoever_fills_the_queue_does_not_keep_others_out() -> None:
    driver = Driver(slots=1, limits=LimitsConfig(max_queue_size=16))
    for _ in range(16):
        driver.ask([1], 4, cache_salt="flood")
    assert "Maximum queue size of 16 is reached" in driver.error(driver.ask([1], 4, cache_salt="flood"))
    others = [driver.ask([2], 2, cache_salt=f"other {each}") for each in range(2)]
    assert not any(each in driver.responses for each in others), "they wait"
    assert "Maximum queue size" in driver.error(driver.ask([1], 4, cache_salt="third")), "there is an end to it"
    driver.run()
    assert all(len(driver.tokens(each)) == 2 for each in others)


def test_the_same_holds_for_prompt_tokens() -> None:
    driver = Driver(slots=1, pool_tokens=256, limits=LimitsConfig(max_queued_tokens=64))
    for _ in range(4):
        driver.ask(list(range(16)), 4, cache_salt="flood")
    assert "prompt tokens wait" in driver.error(driver.ask(list(range(16)), 4, cache_salt="flood"))
    assert driver.ask(list(range(8)), 2, cache_salt="other") not in driver.responses
    assert "prompt tokens wait" in driver.error(driver.ask(list(range(9)), 2, cache_salt="third")), (
        "more than an eighth"
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ('["gold"]', "holds 'gold'; write it as NAMESPACE=TURNS"),
        ('["=3"]', "holds '=3'; write it as NAMESPACE=TURNS"),
        ('["gold=0"]', "the turns a number from 1 to 1000"),
        ('["gold=1001"]', "the turns a number from 1 to 1000"),
        ('["gold=1e3"]', "the turns a number from 1 to 1000"),
        ('["gold=²"]', "the turns a number from 1 to 1000"),
        ('["a=1", "a=2"]', "gives a namespace twice"),
    ],
)
def test_weights_are_checked(weights: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"scheduler.namespace_weights={weights}"])


def test_a_namespace_may_contain_an_equals_sign() -> None:
    config = load_config(None, ['scheduler.namespace_weights=["a=b=7"]'])
    assert config.scheduler.weights == {"a=b": 7}


def flooded(slots: int = 8, **more: object) -> Driver:
    """All slots but those that are kept are taken by a flood that has more to come, and others have asked before."""
    driver = Driver(slots=slots, pool_tokens=1024, max_num_tokens=16, **more)
    driver.ask([1], 1, cache_salt="other")
    driver.run()
    for _ in range(3 * slots):
        driver.ask([2], 40, cache_salt="flood")
    driver.step(3)
    return driver


def first_token_after(driver: Driver, request_id: int) -> int:
    """Steps until a request has its first token."""
    for number in range(1, 200):
        driver.step()
        if request_id in driver.responses:
            return number
    raise AssertionError("it is not served")


def test_a_flood_leaves_a_slot_to_the_others() -> None:
    driver = flooded()
    assert len(driver.core.scheduler.running) == 7
    assert first_token_after(driver, driver.ask([3], 2, cache_salt="other")) == 1


def test_a_flood_that_is_alone_has_all_slots() -> None:
    driver = Driver(slots=8, pool_tokens=1024, max_num_tokens=16)
    for _ in range(100):
        driver.ask([2], 1, cache_salt="other")
    driver.run()
    for _ in range(RECENT + 40):
        driver.ask([2], 4, cache_salt="flood")
    running = []
    while driver.core.has_work:
        driver.step()
        running.append(len(driver.core.scheduler.running))
    assert running[0] == 7 and 8 in running, "the other has not asked lately"


def test_slots_that_a_flood_gives_back_count_no_longer() -> None:
    driver = flooded()
    driver.run()
    driver.ask([1], 1, cache_salt="other")
    driver.run()
    for _ in range(4):
        driver.ask([5], 40, cache_salt="third")
        driver.ask([4], 40, cache_salt="flood")
    driver.step(3)
    assert len(driver.core.scheduler.running) == 8, "no namespace has more than the half"


def test_prompts_of_a_flood_come_behind_those_of_others() -> None:
    driver = Driver(slots=8, pool_tokens=1024, max_num_tokens=16)
    driver.ask([1], 1, cache_salt="other")
    driver.run()
    for _ in range(6):
        driver.ask([2], 40, cache_salt="flood")
    driver.step()
    driver.ask(list(range(100)), 4, cache_salt="flood")
    driver.step(2)
    assert first_token_after(driver, driver.ask(list(range(50, 58)), 2, cache_salt="other")) == 1
