"""Deadlines by themselves: bounded in number, and none of a live request is lost."""

from __future__ import annotations

import pytest

from backend.core.sequence import Sequence
from backend.engine.deadlines import Deadlines
from tests.kvcache.harness import make_sequence


def due(deadlines: Deadlines, now_ns: int, live: dict[int, Sequence]) -> list[int]:
    return [seq.request_id for seq in deadlines.pop_due(now_ns, live)]


def sequence(request_id: int, deadline_ns: int | None) -> Sequence:
    seq = make_sequence(request_id, [1])
    seq.deadline_ns = deadline_ns
    return seq


@pytest.mark.parametrize("num_ended", [10, 64, 65, 66, 67, 200])
def test_entries_of_requests_that_have_ended_do_not_pile_up(num_ended: int) -> None:
    deadlines, live = Deadlines(), {1: sequence(1, 50)}
    deadlines.note(live[1], live)
    for number in range(num_ended):
        live[100] = sequence(100, 1000 + number)
        deadlines.note(live[100], live)
        assert len(deadlines) <= 2 * len(live) + 64 + 1
    live[2], live[3] = sequence(2, 40), sequence(3, None)
    for number in (2, 3):
        deadlines.note(live[number], live)
    assert due(deadlines, 39, live) == [] and due(deadlines, 50, live) == [2, 1]
    assert due(deadlines, 10**9, live) == [100], "once, at its latest deadline"
    assert len(deadlines) == 0


def test_a_request_that_ends_while_others_are_ended_is_skipped() -> None:
    deadlines, live = Deadlines(), {number: sequence(number, 10) for number in (1, 2, 3)}
    for seq in live.values():
        deadlines.note(seq, live)
    ended = []
    for seq in deadlines.pop_due(10, live):
        ended.append(seq.request_id)
        live.pop(2, None)
    assert ended == [1, 3]
