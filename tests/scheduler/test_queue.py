"""The waiting queue counts what it holds, whoever leaves it and however."""

from __future__ import annotations

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
