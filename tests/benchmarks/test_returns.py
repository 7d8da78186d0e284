"""The parts of `bench returns`: the order of turns, percentiles, and what is called slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.returns import TRACES, ReturnRow, make_trace, p99_ratio, rounds_of, slower_rows

ROW = ReturnRow("chat", 0.05, 100, 1, 10.0, 5.0, 20.0, 10.0, 2.0, 0.9, 0.8, 0)


@pytest.mark.parametrize("streams", [1, 3, 32])
def test_rounds_hold_every_turn_once_in_order_and_no_conversation_twice(streams: int) -> None:
    trace = make_trace(TRACES["chat"].scaled(0.01), 7, 3, 100)
    rounds = list(rounds_of(trace, streams))
    assert max(map(len, rounds)) == min(streams, 7)
    for turns in rounds:
        assert len({turn.conversation for turn in turns}) == len(turns)
    played = [turn for turns in rounds for turn in turns]
    assert len(played) == len(trace) == 21
    for conversation in range(7):
        own = [turn for turn in trace if turn.conversation == conversation]
        assert [turn for turn in played if turn.conversation == conversation] == own
        assert [turn.is_return for turn in own] == [False, True, True]


def test_one_turn_at_a_time_keeps_the_order_of_the_trace() -> None:
    trace = make_trace(TRACES["agent"].scaled(0.01), 5, 4, 100)
    assert [turns[0] for turns in rounds_of(trace, 1)] == trace


def test_what_is_slower_with_the_level_is_named() -> None:
    late, late_at_last = replace(ROW, ratio=0.97), replace(ROW, level_p99_ms=21.0)
    many = replace(late_at_last, streams=32)
    assert p99_ratio(ROW) == 2
    assert list(slower_rows([ROW, late, late_at_last, many])) == [late, many]
