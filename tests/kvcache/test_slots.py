"""Rows of the persistent batch."""

from __future__ import annotations

import pytest

from backend.kvcache.state import SlotManager


@pytest.mark.feature("004-02")
def test_slots_are_prepared_in_advance_and_the_lowest_free_one_is_given_first() -> None:
    slots = SlotManager(3)
    assert slots.num_free == 3
    assert [slots.acquire(seq_id) for seq_id in (10, 11, 12)] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    assert [slots.acquire(seq_id) for seq_id in (13, 14)] == [0, 2]
    slots.check_integrity()


def test_no_more_slots_are_given_than_there_are() -> None:
    slots = SlotManager(1)
    slots.acquire(1)
    with pytest.raises(IndexError):
        slots.acquire(2)
    slots.check_integrity()


def test_a_slot_that_is_not_held_cannot_be_released() -> None:
    slots = SlotManager(2)
    slot = slots.acquire(1)
    slots.release(slot)
    for wrong in (slot, 1):
        with pytest.raises(KeyError):
            slots.release(wrong)
    assert slots.num_free == 2
