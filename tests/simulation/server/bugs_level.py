"""Planted bugs of the second level of KV: its threads, its traffic beside the steps, what is found after an engine's death."""

from __future__ import annotations

from backend.core.kept_block import RecordFormat
from backend.engine import level_threads
from backend.engine.level_threads import LevelThreads
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.prefix_trie import enter_cached
from backend.kvcache.second_level import SecondLevel
from tests.mutants.changes import SetAttribute, change, change_everywhere
from tests.simulation.server import disk, faults


def _always(set_attribute: SetAttribute, is_harmed: bool = True) -> None:
    """Every seed has a second level, and all that can go wrong with a disk or nothing, so that fewer schedules are needed."""
    set_attribute(faults, "LEVEL_SHARE", 1.0)
    set_attribute(disk, "KIND_SHARE", float(is_harmed))


def the_checksum_of_a_block_is_not_compared(set_attribute: SetAttribute) -> None:
    _always(set_attribute)
    change(RecordFormat, "check", ("checksum_of(data) == kept.checksum", "True"))(set_attribute)


def another_block_of_the_level_is_taken(set_attribute: SetAttribute) -> None:
    """A write that went to another place is not noticed."""
    _always(set_attribute)
    change(RecordFormat, "check", ("kept.block != wanted", "False"))(set_attribute)


def a_load_is_never_given_up(set_attribute: SetAttribute) -> None:
    """Its sequence waits as long as the disk does."""
    _always(set_attribute)
    set_attribute(LevelTraffic, "_gives_up", lambda self, load: False)


def the_end_of_a_load_is_not_reported(set_attribute: SetAttribute) -> None:
    _always(set_attribute, is_harmed=False)
    change(LevelThreads, "_read", ("self._post(partial(self._reports.ended, load))", "pass"))(set_attribute)


def a_read_that_fails_ends_the_reader(set_attribute: SetAttribute) -> None:
    _always(set_attribute)
    change(level_threads, "read_one", ("except OSError", "except KeyError"))(set_attribute)


def a_write_that_fails_ends_the_writer(set_attribute: SetAttribute) -> None:
    _always(set_attribute)
    change(level_threads, "write_one", ("except OSError", "except KeyError"))(set_attribute)


def a_level_that_cannot_be_read_ends_the_writer(set_attribute: SetAttribute) -> None:
    _always(set_attribute)
    change(LevelThreads, "_scan", ("except OSError", "except KeyError"))(set_attribute)


def an_end_waits_for_the_disk(set_attribute: SetAttribute) -> None:
    _always(set_attribute)
    change(LevelThreads, "close", ("thread.join(CLOSE_S)", "thread.join()"))(set_attribute)


def the_store_stays_open(set_attribute: SetAttribute) -> None:
    _always(set_attribute, is_harmed=False)
    change(LevelThreads, "close", ("self._store.close()", "pass"))(set_attribute)


def onboarded_blocks_stay_locked(set_attribute: SetAttribute) -> None:
    _always(set_attribute, is_harmed=False)
    change_everywhere(enter_cached, ("blocks.release(handle.block_id, keep=True)", "pass"))(set_attribute)


def namespaces_find_each_other(set_attribute: SetAttribute) -> None:
    _always(set_attribute, is_harmed=False)
    change(SecondLevel, "_chain", ("seq.namespace", "''"))(set_attribute)
