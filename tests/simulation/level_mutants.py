"""Planted bugs of the second level of KV, which the simulator must notice."""

from __future__ import annotations

from backend.core.kept_block import RecordFormat
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.prefix_trie import enter_cached
from backend.kvcache.second_level import SecondLevel
from backend.scheduler.scheduler import Scheduler
from tests.mutants.changes import Plant, SetAttribute, change, change_everywhere
from tests.simulation import level


def _leave_the_head(set_attribute: SetAttribute) -> None:
    """The known blocks in front of those that come are not locked meanwhile."""
    change(SecondLevel, "onboard", ("self._blocks.lock(handle.block_id)", "pass"))(set_attribute)
    change_everywhere(enter_cached, ("reversed(handles)", "reversed(new)"))(set_attribute)


_PLANTS: dict[str, Plant] = {
    "another_block_of_the_level_is_taken": change(RecordFormat, "check", ("kept.block != wanted", "False")),
    "the_checksum_of_a_block_is_not_compared": change(
        RecordFormat, "check", ("checksum_of(data) == kept.checksum", "True")
    ),
    "a_block_that_was_used_again_is_copied": change(
        SecondLevel, "take_offloads", ("not self._blocks.is_current(handle)", "False")
    ),
    "copies_from_before_a_failed_step_are_written": change(
        LevelTraffic, "_hand_over", ("copy.epoch == self._level.num_lost_epochs", "True")
    ),
    "the_level_is_not_told_of_a_lost_pool": change(
        KVCacheManager, "lose_everything", ("self.level is not None", "False")
    ),
    "the_head_of_a_prefix_may_go_while_its_tail_comes": _leave_the_head,
    "blocks_come_where_the_pool_has_lost_what_is_before_them": change(SecondLevel, "onboard", ("first < start", "False")),
    "blocks_that_the_pool_has_got_meanwhile_shift_the_others": change(
        LevelTraffic, "_land", ("load.data[first - load.start :]", "load.data")
    ),
    "onboarded_blocks_stay_locked": change_everywhere(
        enter_cached, ("blocks.release(handle.block_id, keep=True)", "pass")
    ),
    "a_sequence_that_waits_for_its_kv_is_rejected": change(Scheduler, "_admit", ("or plan.has_held or", "or")),
    "a_load_outlives_its_request": change(
        Scheduler, "remove", ("self._loads.forget(seq)", "pass")
    ),
    "the_room_planned_for_a_held_sequence_is_not_given_back": change(
        Scheduler, "_admit", ("plan.kv.rollback(mark)", "pass")
    ),
    "a_place_is_lost_when_a_write_fails": change(SecondLevel, "written", ("self._free.append(place)", "pass")),
    "a_stalled_level_is_waited_for": change(LevelTraffic, "_gives_up", ("> STALL_S * 1e9", "< 0")),
    "a_sequence_asks_the_level_for_ever": change(LevelTraffic, "holds_back", ("self._asked.add(seq.seq_id)", "pass")),
    "namespaces_find_each_other": change(
        SecondLevel, "_chain", ("seq.namespace", "''")
    ),
}  # fmt: skip


def _in_every_setup(plant: Plant) -> Plant:
    """With the bug, every engine has a second level, so that fewer schedules are needed."""

    def planted(set_attribute: SetAttribute) -> None:
        set_attribute(level, "SHARE", 1.0)
        plant(set_attribute)

    return planted


MUTANTS: dict[str, Plant] = {name: _in_every_setup(plant) for name, plant in _PLANTS.items()}
