"""Priorities of waiting requests: the higher one runs first, and among equals who came first."""

from __future__ import annotations

import random

import pytest

from backend.api import Request
from backend.core.sequence import Event, Sequence
from backend.scheduler.queue import WaitingQueue
from tests.scheduler.runner import Runner


def waiting(number: int, priority: float) -> Sequence:
    return Sequence(number, number, Request([1], 1, priority=priority), number, 0)


def test_the_line_is_by_priority_then_by_arrival() -> None:
    dice = random.Random(3)
    queue, sequences = WaitingQueue(), [waiting(n, dice.choice((0.0, 0.25, 0.5, 1.0))) for n in range(50)]
    for seq in sequences:
        queue.append(seq)
    assert list(queue) == sorted(sequences, key=lambda seq: (-seq.request.priority, seq.arrival))


def test_nobody_gets_ahead_of_the_paused() -> None:
    queue, paused = WaitingQueue(), waiting(1, 0.1)
    paused.apply(Event.ADMIT)
    paused.apply(Event.PAUSE)
    queue.append(waiting(2, 0.5))
    queue.put_back(paused)
    queue.append(waiting(3, 1.0))
    assert [seq.request_id for seq in queue] == [1, 3, 2]


def test_an_urgent_request_overtakes_those_that_wait_and_none_that_runs() -> None:
    runner = Runner(slots=1)
    runner.ask(1, [1], 4)
    runner.step()
    runner.ask(2, [2], 2)
    runner.ask(3, [3], 2, priority=0.9)
    runner.run()
    order = [running for seen in runner.seen for running in seen.running]
    assert order == [1, 1, 1, 1, 3, 3, 2, 2]


@pytest.mark.parametrize("priority", [-0.1, 1.5, float("nan")])
def test_a_priority_is_between_0_and_1(priority: float) -> None:
    runner = Runner()
    runner.ask(1, [1], 1, priority=priority)
    (response,) = runner.responses[1]
    assert response.error_msg == f"priority is {priority}, allowed is 0 to 1"


def test_a_priority_that_appears_late_has_not_waited_for_those_that_were_served_before() -> None:
    queue = WaitingQueue(max_overtakes=2)
    for number in range(5):
        early = waiting(number, 1.0)
        queue.append(early)
        queue.take(early)
    for number, priority in ((10, 0.1), (11, 1.0), (12, 1.0), (13, 1.0)):
        queue.append(waiting(number, priority))
    assert [seq.request_id for seq in queue] == [11, 12, 10, 13], "two may overtake it, from its own arrival on"
