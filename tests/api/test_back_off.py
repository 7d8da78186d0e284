"""When a process that has ended is started again, and when it is given up."""

from __future__ import annotations

from backend.api.processes.back_off import QUIET_S, WINDOW_S, BackOff


def test_delays_double_from_half_a_second_to_half_a_minute() -> None:
    back_off = BackOff(5)
    ends = [WINDOW_S * number for number in range(9)]  # too far apart to be given up
    assert [back_off.delay_after_end(end, 0.0) for end in ends] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_process_that_keeps_ending_is_given_up_at_the_end_after_the_last_restart() -> None:
    back_off = BackOff(5)
    assert None not in [back_off.delay_after_end(float(number), 0.0) for number in range(5)]
    assert back_off.delay_after_end(10.0, 0.0) is None
    assert back_off.since_first_s(10.0) == 10.0


def test_a_quiet_minute_between_ends_starts_the_count_and_the_delays_anew() -> None:
    back_off = BackOff(5)
    for number in range(5):
        back_off.delay_after_end(float(number), 0.0)
    assert back_off.delay_after_end(90.0, QUIET_S + 1) == 0.5
    assert [back_off.delay_after_end(91.0, 0.0) for _ in range(5)] == [1, 2, 4, 8, None]


def test_without_a_limit_nothing_is_given_up() -> None:
    back_off = BackOff(None)
    assert [back_off.delay_after_end(0.0, 0.0) for _ in range(99)][-1] == 30


def test_ends_that_are_forgiven_count_no_more_and_neither_do_their_delays() -> None:
    back_off = BackOff(max_restarts=2)
    assert [back_off.delay_after_end(now, 1.0) for now in (1.0, 2.0)] == [0.5, 1.0]
    back_off.forgive(3)
    assert [back_off.delay_after_end(now, 1.0) for now in (3.0, 4.0, 5.0)] == [0.5, 1.0, None]


def test_one_end_of_several_is_forgiven() -> None:
    back_off = BackOff(max_restarts=3)
    assert [back_off.delay_after_end(now, 1.0) for now in (1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0]
    back_off.forgive(1)
    assert [back_off.delay_after_end(now, 1.0) for now in (4.0, 5.0)] == [2.0, None]
