"""The pool: reference counts, the order in which blocks are taken and evicted, growth and shrinking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend.kvcache.block import DROPPED
from backend.kvcache.block_manager import BlockManager, OutOfBlocks


@pytest.fixture
def pool() -> Iterator[BlockManager]:
    manager = BlockManager(4)
    yield manager
    manager.check_integrity()


@pytest.mark.feature("003-14")
def test_a_new_block_has_its_number_one_reference_and_content_of_its_own(pool: BlockManager) -> None:
    first, second = pool.allocate(), pool.allocate()
    assert first.block_id != second.block_id
    assert (first.ref_count, second.ref_count) == (1, 1)
    assert 0 != first.unique_id != second.unique_id != 0
    assert first.handle == (first.block_id, first.unique_id)


@pytest.mark.feature("003-14")
def test_content_that_is_lost_makes_its_handle_stale_even_when_the_block_is_used_again(pool: BlockManager) -> None:
    block = pool.allocate()
    handle = block.handle
    assert pool.verify([handle]) == 1
    pool.release(block.block_id, keep=False)
    assert pool.verify([handle]) == 0
    again = pool.allocate()
    assert again.block_id == block.block_id and pool.verify([handle]) == 0


def test_verify_counts_from_the_front_and_lets_dropped_entries_pass(pool: BlockManager) -> None:
    blocks = [pool.allocate() for _ in range(3)]
    handles = [DROPPED, *(block.handle for block in blocks)]
    assert pool.verify(handles) == 4
    pool.release(blocks[1].block_id, keep=False)
    assert pool.verify(handles) == 2


@pytest.mark.feature("003-16")
def test_an_empty_pool_raises_and_stays_as_it_was(pool: BlockManager) -> None:
    for _ in range(4):
        pool.allocate()
    with pytest.raises(OutOfBlocks, match="all 4 KV blocks are in use"):
        pool.allocate()
    assert (pool.num_free, pool.num_cached, pool.num_active, pool.num_allocated_total) == (0, 0, 4, 4)


@pytest.mark.feature("003-16")
@pytest.mark.parametrize("keep", [False, True])
def test_a_double_free_raises(pool: BlockManager, keep: bool) -> None:
    block = pool.allocate()
    pool.release(block.block_id, keep)
    with pytest.raises(RuntimeError, match=f"block {block.block_id} is released more often than it was locked"):
        pool.release(block.block_id, keep)
    assert pool.num_active == 0


@pytest.mark.feature("003-16")
def test_a_block_returns_only_with_its_last_reference(pool: BlockManager) -> None:
    block = pool.allocate()
    pool.lock(block.block_id)
    pool.lock(block.block_id)
    for left in (2, 1):
        pool.release(block.block_id, keep=False)
        assert (block.ref_count, pool.num_active, pool.num_free) == (left, 1, 3)
    pool.release(block.block_id, keep=False)
    assert (block.ref_count, pool.num_active, pool.num_free) == (0, 0, 4)


@pytest.mark.feature("004-07")
def test_a_kept_block_is_cached_and_can_be_locked_again_with_its_content(pool: BlockManager) -> None:
    block = pool.allocate()
    handle = block.handle
    pool.release(block.block_id, keep=True)
    assert (pool.num_free, pool.num_cached, pool.num_active, pool.num_available) == (3, 1, 0, 4)
    pool.lock(block.block_id)
    assert (pool.num_cached, pool.num_active) == (0, 1)
    assert pool.verify([handle]) == 1


@pytest.mark.feature("004-07")
def test_free_blocks_are_taken_first_then_the_least_recently_used_cached_one() -> None:
    evicted: list[int] = []
    pool = BlockManager(3, on_evict=evicted.append)
    a, b, c = (pool.allocate().block_id for _ in range(3))
    for block_id in (a, b):
        pool.release(block_id, keep=True)
    pool.release(c, keep=False)
    evicted.clear()
    assert pool.allocate().block_id == c and evicted == []
    pool.lock(a)  # a is used again: b is the oldest now
    pool.release(a, keep=True)
    assert [pool.allocate().block_id for _ in range(2)] == [b, a]
    assert evicted == [b, a] and pool.num_evicted_total == 2


@pytest.mark.feature("004-11")
def test_a_block_with_references_is_never_evicted(pool: BlockManager) -> None:
    active = pool.allocate().handle
    for _ in range(3):
        pool.release(pool.allocate().block_id, keep=True)
    for _ in range(3):
        assert pool.allocate().block_id != active.block_id
    with pytest.raises(OutOfBlocks):
        pool.evict_first()
    assert pool.verify([active]) == 1


def test_a_cached_block_that_nobody_can_ask_for_is_discarded_and_others_are_left_alone(pool: BlockManager) -> None:
    cached, active = pool.allocate(), pool.allocate()
    pool.release(cached.block_id, keep=True)
    pool.discard(cached.block_id)
    pool.discard(active.block_id)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (3, 0, 1)
    assert pool.num_evicted_total == 0


@pytest.mark.feature("004-09")
@pytest.mark.parametrize(
    "chunk, backed",
    [
        (-1, [10] * 10),
        (1, list(range(1, 11))),
        (3, [3, 3, 3, 6, 6, 6, 9, 9, 9, 10]),
        (0, [3, 3, 3, 6, 6, 6, 9, 9, 9, 10]),
    ],
)
def test_memory_is_obtained_in_chunks_as_blocks_are_taken(chunk: int, backed: list[int]) -> None:
    pool = BlockManager(10, chunk)
    seen = []
    for _ in range(10):
        pool.allocate()
        seen.append(pool.num_backed)
        pool.check_integrity()
    assert seen == backed
    assert (pool.num_free, pool.num_active) == (0, 10)


def test_the_pool_grows_before_it_evicts() -> None:
    pool = BlockManager(2, chunk_blocks=1)
    first = pool.allocate()
    pool.release(first.block_id, keep=True)
    pool.allocate()
    assert (pool.num_backed, pool.num_cached, pool.num_evicted_total) == (2, 1, 0)
