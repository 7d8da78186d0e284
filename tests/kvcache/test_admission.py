"""NOW, LATER or NEVER: the three answers to a sequence that wants to run, at their boundaries."""

from __future__ import annotations

import pytest

from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, make_sequence


def cache_with(num_blocks: int, used: int = 0, **options: object) -> Cache:
    """`used` blocks of 4 tokens are held by a running sequence."""
    cache = Cache(num_blocks, enable_block_reuse=False, **options)
    if used:
        cache.start(make_sequence(99, list(range(4 * used))))
    return cache


@pytest.mark.feature("003-17")
@pytest.mark.parametrize("tokens, answer", [(1, Admission.NOW), (12, Admission.NOW), (13, Admission.LATER)])
def test_a_sequence_is_admitted_now_when_its_blocks_are_free(tokens: int, answer: Admission) -> None:
    cache = cache_with(8, used=5)
    assert cache.judge(make_sequence(1, list(range(tokens)))) is answer


@pytest.mark.feature("003-17", "003-18")
@pytest.mark.parametrize("headroom, answer", [(0, Admission.NOW), (1, Admission.NOW), (2, Admission.LATER)])
def test_blocks_that_must_stay_free_count_as_taken(headroom: int, answer: Admission) -> None:
    cache = cache_with(8, used=5)
    assert cache.judge(make_sequence(1, [1] * 8), headroom) is answer


@pytest.mark.feature("003-18")
def test_later_becomes_now_when_blocks_come_back() -> None:
    cache = cache_with(8)
    running = cache.start(make_sequence(1, [1] * 20))
    waiting = make_sequence(2, [2] * 16)
    assert cache.judge(waiting) is Admission.LATER
    cache.release(running)
    assert cache.judge(waiting) is Admission.NOW


@pytest.mark.feature("003-19")
@pytest.mark.parametrize("tokens, answer", [(32, Admission.LATER), (33, Admission.NEVER)])
def test_what_exceeds_the_whole_pool_never_fits(tokens: int, answer: Admission) -> None:
    cache = cache_with(8, used=1)
    assert cache.judge(make_sequence(1, list(range(tokens)))) is answer


@pytest.mark.feature("003-19", "003-20")
@pytest.mark.parametrize("blocks, answer", [(99, Admission.NOW), (100, Admission.NEVER)])
def test_the_watermark_is_out_of_reach_for_ever(blocks: int, answer: Admission) -> None:
    cache = cache_with(100, watermark=0.01)
    assert cache.judge(make_sequence(1, [7] * 4 * blocks)) is answer


@pytest.mark.feature("003-20")
@pytest.mark.parametrize("num_blocks, kept_back", [(100, 1), (50, 0), (99, 0), (199, 1), (250, 2)])
def test_the_watermark_is_the_share_of_the_pool_rounded_down(num_blocks: int, kept_back: int) -> None:
    cache = Cache(num_blocks, watermark=0.01)
    assert cache.kv.watermark_blocks == kept_back
    assert cache.kv.usable_blocks == num_blocks - kept_back


def test_without_a_free_slot_the_answer_is_later() -> None:
    cache = cache_with(8, slots=1)
    first = cache.start(make_sequence(1, [1]))
    assert cache.judge(make_sequence(2, [2])) is Admission.LATER
    cache.release(first)
    assert cache.judge(make_sequence(2, [2])) is Admission.NOW


def test_admissions_of_one_plan_do_not_get_the_same_blocks_or_slots() -> None:
    cache = cache_with(4, slots=3)
    plan = cache.kv.plan()
    first, second, third = (make_sequence(i, [i] * 8) for i in (1, 2, 3))
    assert [plan.admit(seq, 8, 0) for seq in (first, second, third)] == [Admission.NOW, Admission.NOW, Admission.LATER]
    cache.kv.commit(plan)
    assert sorted(cache.blocks(first) + cache.blocks(second)) == [0, 1, 2, 3]
    assert {first.slot, second.slot} == {0, 1} and third.slot is None


def test_cached_blocks_count_as_free_unless_the_sequence_itself_wants_them() -> None:
    cache = Cache(4)
    first = cache.start(make_sequence(1, [1] * 8))
    cache.run(first)
    cache.release(first)  # two blocks stay cached, known by their tokens
    assert cache.kv.stats().cached_num_blocks == 2
    assert cache.judge(make_sequence(2, [2] * 16)) is Admission.NOW
    assert cache.judge(make_sequence(3, [1] * 8 + [3] * 8)) is Admission.NOW
    assert cache.judge(make_sequence(3, [1] * 8 + [3] * 8), headroom=1) is Admission.LATER


def test_a_pause_in_the_plan_makes_room_in_the_same_plan() -> None:
    cache = cache_with(4)
    old, new = make_sequence(1, [1] * 16), make_sequence(2, [2] * 16)
    cache.start(old)
    plan = cache.kv.plan()
    assert plan.admit(new, 16, 0) is Admission.LATER
    plan.pause(old)
    assert plan.admit(new, 16, 0) is Admission.NOW
    cache.kv.commit(plan)
    assert cache.kv.num_evicted_blocks(old) == 4
    cache.kv.check_integrity([new])


def test_the_slots_of_one_plan_are_counted_whoever_takes_one_or_gives_it_back() -> None:
    cache = cache_with(40, slots=2)
    running = cache.start(make_sequence(1, [1] * 4))
    admitted, reserved, late = (make_sequence(i, [i] * 4) for i in (2, 3, 4))
    plan = cache.kv.plan()
    mark = plan.mark()
    assert plan.admit(admitted, 4, 0) is Admission.NOW
    assert [plan.admit(late, 4, 0), plan.reserve_slot(late)] == [Admission.LATER] * 2
    plan.pause(running)
    assert plan.reserve_slot(reserved) is Admission.NOW
    assert [plan.admit(late, 4, 0), plan.reserve_slot(late)] == [Admission.LATER] * 2
    plan.rollback(mark)
    assert [plan.reserve_slot(late), plan.admit(admitted, 4, 0)] == [Admission.NOW, Admission.LATER]
