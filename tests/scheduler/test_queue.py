"""The waiting queue counts what it holds, whoever leaves it and however."""

from __future__ import annotations

import random

import pytest

from backend.api import Request
from backend.core.sequence import Event, Sequence
from backend.scheduler.queue import WaitingQueue


def sequence(number: int, num_tokens: int) -> Sequence:
    return Sequence(number, number, Request([number] * num_tokens, 4), number, 0)


def paused(number: int, num_tokens: int) -> Sequence:
    seq = sequence(number, num_tokens)
    seq.apply(Event.ADMIT)
    seq.apply(Event.PAUSE)
    return seq


@pytest.mark.feature("003-36", "003-49")
def test_new_sequences_go_to_the_back_and_paused_ones_to_the_front() -> None:
    queue = WaitingQueue()
    assert queue.head is None and len(queue) == 0
    third, fourth = sequence(3, 2), sequence(4, 5)
    queue.append(third)
    queue.append(fourth)
    second, first = paused(2, 7), paused(1, 1)
    queue.put_back(second)  # the youngest of the paused first
    queue.put_back(first)
    assert [seq.seq_id for seq in queue] == [1, 2, 3, 4]
    assert queue.head is first
    assert (len(queue), queue.num_tokens, queue.num_paused) == (4, 15, 2)


def test_the_counts_follow_who_leaves_from_the_head_and_from_the_middle() -> None:
    queue = WaitingQueue()
    waiting = [sequence(number, number) for number in (1, 2, 3)]
    for seq in waiting:
        queue.append(seq)
    resting = paused(9, 10)
    queue.put_back(resting)
    for seq, left in ((waiting[1], (14, 1)), (resting, (4, 0)), (waiting[0], (3, 0)), (waiting[2], (0, 0))):
        queue.remove(seq)
        assert (queue.num_tokens, queue.num_paused) == left
    assert len(queue) == 0


def test_who_does_not_wait_cannot_be_taken_out() -> None:
    queue = WaitingQueue()
    queue.append(sequence(1, 3))
    with pytest.raises(ValueError):
        queue.remove(sequence(2, 3))
    assert (len(queue), queue.num_tokens) == (1, 3)


def asked(number: int, request_id: int, namespace: str = "", priority: float = 0.5) -> Sequence:
    return Sequence(number, request_id, Request([1], 1, cache_salt=namespace, priority=priority), number, 0)


def admitted(queue: WaitingQueue, count: int) -> list[int]:
    """Ids of the sequences that are admitted, one at a time."""
    order = []
    for _ in range(count):
        head = queue.head
        assert head is not None
        queue.take(head)
        order.append(head.seq_id)
    return order


def test_requests_take_turns_with_one_that_has_many_sequences() -> None:
    queue = WaitingQueue()
    for seq in [asked(n, 1) for n in range(10, 15)] + [asked(20, 2), asked(30, 3)]:
        queue.append(seq)
    assert [seq.seq_id for seq in queue] == [10, 20, 30, 11, 12, 13, 14]
    assert admitted(queue, 4) == [10, 20, 30, 11]
    queue.append(asked(40, 4))
    assert admitted(queue, 4) == [12, 40, 13, 14] and len(queue) == 0


def test_namespaces_take_turns_however_many_requests_each_has() -> None:
    queue = WaitingQueue()
    for number in range(5):
        queue.append(asked(10 + number, 10 + number, "a"))
    assert admitted(queue, 2) == [10, 11]
    queue.append(asked(20, 20, "b"))
    queue.append(asked(21, 21, "b"))
    assert admitted(queue, 5) == [12, 20, 13, 21, 14]


def test_a_plan_sees_the_order_in_which_turns_will_be_taken() -> None:
    """The scheduler admits several sequences in one plan, by iterating, and takes them out when the plan is committed."""
    dice = random.Random(5)
    for _ in range(50):
        queue = WaitingQueue()
        for number in range(dice.randint(1, 30)):
            namespace = dice.choice("abc")
            request_id = 10 * ord(namespace) + dice.randint(0, 4)
            queue.append(asked(number, request_id, namespace, 0.25 * (request_id % 2)))
        expected = [seq.seq_id for seq in queue]
        assert admitted(queue, len(expected)) == expected


def test_a_stream_of_new_requests_does_not_starve_a_request_with_many_sequences() -> None:
    queue = WaitingQueue()
    for number in range(4):
        queue.append(asked(number, 1))
    order = []
    for number in range(10, 40):
        queue.append(asked(number, number))
        queue.append(asked(100 + number, 100 + number))
        order += admitted(queue, 1)
    assert {0, 1, 2, 3} <= set(order)


def test_whoever_leaves_without_being_admitted_has_not_had_a_turn() -> None:
    queue = WaitingQueue()
    waiting = [asked(10, 1), asked(11, 1), asked(20, 2)]
    for seq in waiting:
        queue.append(seq)
    queue.remove(waiting[0])
    assert admitted(queue, 2) == [11, 20]


def test_nothing_is_remembered_of_those_that_have_left() -> None:
    queue = WaitingQueue()
    for number in range(20):
        queue.append(asked(number, number // 2, str(number % 3), number / 20))
    admitted(queue, 10)
    for seq in list(queue):
        queue.remove(seq)
    assert (queue._levels, queue._priorities, len(queue), queue.num_tokens) == ({}, [], 0, 0)
