"""Bugs planted in the KV pool that outlives the engine."""

from __future__ import annotations

from backend.kvcache.pool_records import PoolRecords
from tests.mutants.changes import Plant, change

POOL = ["tests/crashes/test_kept_pool.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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
}
