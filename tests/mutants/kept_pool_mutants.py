"""Bugs planted in the KV pool that outlives the engine."""

from __future__ import annotations

from backend.engine import cache
from backend.engine.intake import Intake
from backend.executor.engine_supervisor import EngineProcess
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.pool_records import PoolRecords
from backend.kvcache.prefix_trie import PrefixTrie
from backend.storage.pool_file import PoolFile
from tests.mutants.changes import Plant, change, change_everywhere

POOL = ["tests/crashes/test_kept_pool.py"]
SUPERVISOR = ["tests/executor/test_supervisor.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "the_kv_of_an_inherited_block_is_not_checked": (
        change(PoolRecords, "_is_whole", (" and self._file.checksum(inherited.handle.block_id) == kept.checksum", "")),
        POOL,
    ),
    "a_damaged_block_is_tried_again": (
        change(PoolRecords, "find", ("self._blocks.discard(inherited.handle.block_id)", "pass")),
        POOL,
    ),
    "a_record_stays_when_its_block_is_given_away": (
        change(PoolRecords, "forget", ("self._file.erase(block_id)", "pass")),
        POOL,
    ),
    "an_inherited_block_is_found_after_it_was_evicted": (
        change(PoolRecords, "forget", ("del self._inherited[key]", "pass")),
        POOL,
    ),
    "the_trie_does_not_tell_of_inherited_blocks_that_are_evicted": (
        change(PrefixTrie, "forget", ("self.records.forget(block_id)", "pass")),
        POOL,
    ),
    "blocks_below_one_that_is_evicted_keep_their_records": (
        change(PrefixTrie, "forget", ("self.records.forget(cut.handle.block_id)", "pass")),
        POOL,
    ),
    "a_record_is_written_for_a_block_that_has_gone": (
        change(
            PoolRecords,
            "record",
            ("self._keys.get(due.handle.block_id) == due.key and self._blocks.is_current(due.handle)", "True"),
        ),
        POOL,
    ),
    "blocks_without_those_before_them_are_held": (
        change(PoolRecords, "_inherit", ("self._reachable(found)", "[(key, *at) for key, at in found.items()]")),
        POOL,
    ),
    "a_torn_record_is_not_counted": (
        change(
            PoolRecords,
            "_inherit",
            ("written.append(BlockId(block_id))", "written += [BlockId(block_id)] * (kept is not None)"),
        ),
        POOL,
    ),
    "kv_that_is_computed_once_more_is_held_twice": (
        change(PoolRecords, "entered", ("if prefix in self._inherited:", "if False:")),
        POOL,
    ),
    "inherited_blocks_are_still_free": (
        change(BlockManager, "inherit", (" if block_id not in taken", "")),
        POOL,
    ),
    "a_header_of_another_model_is_taken": (
        change(PoolFile, "_find", ("header == self._header(num_blocks) and ", "")),
        POOL,
    ),
    "a_file_that_is_too_short_is_mapped": (
        change(PoolFile, "_find", (" and os.fstat(self._descriptor).st_size == self._size(num_blocks)", "")),
        POOL,
    ),
    "the_memory_of_the_pool_counts_twice": (
        change_everywhere(cache.make_cache, (" + (0 if file is None else file.resident_bytes)", "")),
        POOL,
    ),
    "sequences_do_not_look_for_what_is_inherited": (
        change(Intake, "accept", ("self._kv.find_inherited(seq)", "pass")),
        POOL,
    ),
    "a_pool_that_may_end_engines_is_kept": (
        change(EngineProcess, "_count_death", ("self._kept.empty_pool()", "pass")),
        SUPERVISOR,
    ),
}
