"""BlockManager against a model of it: a bag of references, and one list in order of use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.kvcache.block import BlockHandle
from backend.kvcache.block_manager import BlockManager, OutOfBlocks

pytestmark = pytest.mark.feature("003-16")
INDEX = st.integers(0, 1000)


class Pool(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 7), chunk=st.sampled_from([-1, 0, 1, 3]))
    def build(self, num_blocks: int, chunk: int) -> None:
        self.evicted: list[int] = []
        self.pool = BlockManager(num_blocks, chunk, on_evict=self.evicted.append)
        self.num_blocks = num_blocks
        self.references: dict[BlockHandle, int] = {}  # active
        self.cached: list[BlockHandle] = []  # least recently used first
        self.lost: list[BlockHandle] = []

    @rule()
    def allocate(self) -> None:
        if self.pool.num_available <= 0:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return
        evicts = self.pool.num_free == 0
        handle = self.pool.allocate().handle
        if evicts:
            self.lost.append(self.cached.pop(0))
            assert handle.block_id == self.lost[-1].block_id, "not the least recently used block"
        assert handle not in self.lost and handle not in self.references
        self.references[handle] = 1

    @precondition(lambda self: self.references)
    @rule(index=INDEX)
    def share(self, index: int) -> None:
        handle = list(self.references)[index % len(self.references)]
        self.pool.lock(handle.block_id)
        self.references[handle] += 1

    @precondition(lambda self: self.cached)
    @rule(index=INDEX)
    def reuse(self, index: int) -> None:
        handle = self.cached.pop(index % len(self.cached))
        self.pool.lock(handle.block_id)
        self.references[handle] = 1

    @precondition(lambda self: self.references)
    @rule(index=INDEX, keep=st.booleans())
    def release(self, index: int, keep: bool) -> None:
        handle = list(self.references)[index % len(self.references)]
        self.pool.release(handle.block_id, keep)
        self.references[handle] -= 1
        if self.references[handle]:
            return
        del self.references[handle]
        if keep:
            self.cached.append(handle)
        else:
            self.lost.append(handle)

    @precondition(lambda self: self.cached)
    @rule(index=INDEX)
    def discard(self, index: int) -> None:
        handle = self.cached.pop(index % len(self.cached))
        self.pool.discard(handle.block_id)
        self.lost.append(handle)

    @precondition(lambda self: self.cached)
    @rule(index=INDEX)
    def free_twice(self, index: int) -> None:
        with pytest.raises(RuntimeError, match="released more often"):
            self.pool.release(self.cached[index % len(self.cached)].block_id, keep=True)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity()
        assert pool.num_blocks == self.num_blocks
        assert (pool.num_active, pool.num_cached) == (len(self.references), len(self.cached))
        assert sum(block.ref_count for block in pool.blocks) == sum(self.references.values())
        assert all(pool.verify([handle]) for handle in (*self.references, *self.cached))
        assert not any(pool.verify([handle]) for handle in self.lost)
        assert sorted(self.evicted) == sorted(handle.block_id for handle in self.lost)

    def teardown(self) -> None:
        for handle, count in getattr(self, "references", {}).items():
            for _ in range(count):
                self.pool.release(handle.block_id, keep=False)
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.num_active == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
