"""Forked sequences share blocks until one of them writes."""

from __future__ import annotations

import pytest

from backend.core.sequence import Sequence
from tests.kvcache.harness import Cache, answer, make_sequence


def forked(
    num_blocks: int, prompt: list[int], slots: int = 4, children: int = 1
) -> tuple[Cache, Sequence, list[Sequence]]:
    """A parent that has sampled one token, and children that share its table."""
    cache = Cache(num_blocks, slots=slots)
    parent = cache.start(make_sequence(1, prompt))
    cache.run(parent)
    return cache, parent, [cache.fork(parent, 2 + i, seed=50 + i) for i in range(children)]


@pytest.mark.feature("003-27")
def test_a_fork_shares_the_table_and_allocates_nothing() -> None:
    cache, parent, (child,) = forked(2, [1, 2, 3, 4, 5, 6])
    assert cache.kv.state.blocks.num_available == 0
    assert cache.blocks(child) == cache.blocks(parent)
    assert cache.ref_counts(parent) == [2, 2]
    assert child.num_computed_tokens == 6 and child.slot != parent.slot
    cache.kv.check_integrity([parent, child])


@pytest.mark.feature("003-26")
def test_writing_to_a_shared_block_replaces_it_by_a_copy() -> None:
    cache, parent, (child,) = forked(4, [1, 2, 3, 4, 5, 6])
    shared = cache.blocks(parent)
    commit = cache.run(child)
    first, replaced = cache.blocks(child)
    assert commit.copies == cache.copies == [(shared[1], replaced)]
    assert first == shared[0] and replaced != shared[1]
    assert cache.blocks(parent) == shared
    assert cache.ref_counts(parent) == [2, 1] and cache.ref_counts(child) == [2, 1]
    old, new = (cache.workers.cells[block_id] for block_id in (shared[1], replaced))
    assert old[:2] == new[:2] and old[2] != new[2]  # positions 4 and 5 are the same KV, position 6 is the child's alone
    cache.assert_content(parent)
    cache.assert_content(child)


def test_the_block_of_a_copy_is_no_room_for_drafts() -> None:
    """The copy of the second block takes the place of another one, so drafts up to position 8 need a block besides."""
    cache, _, (child,) = forked(4, [1, 2, 3, 4, 5, 6])
    plan = cache.kv.plan()
    assert plan.extend(child, 7) and plan.available == 1
    assert plan.widen(child, 8) and plan.available == 1
    assert plan.widen(child, 9) and plan.available == 0
    cache.kv.commit(plan)
    assert len(cache.blocks(child)) == 3


@pytest.mark.feature("003-25", "003-26")
def test_the_last_holder_of_a_block_writes_in_place() -> None:
    cache, parent, (child,) = forked(4, [1, 2, 3, 4, 5, 6])
    cache.run(child)
    assert cache.run(parent).copies == []
    assert cache.kv.stats().used_num_blocks == 3


@pytest.mark.feature("003-24", "003-26")
def test_behind_a_full_shared_block_a_new_one_is_allocated_without_a_copy() -> None:
    cache, parent, (child,) = forked(4, [1, 2, 3, 4])
    assert cache.run(child).copies == [] and cache.run(parent).copies == []
    assert cache.ref_counts(parent) == [2, 1]


@pytest.mark.feature("003-26", "003-53")
def test_forks_answer_like_sequences_that_never_shared() -> None:
    cache, parent, children = forked(16, [1, 2, 3, 4, 5, 6], children=3)
    branch = list(parent.token_ids)
    for _ in range(9):
        for seq in (*children, parent):
            cache.run(seq)
            cache.assert_content(seq)
    assert parent.token_ids[6:] == answer([1, 2, 3, 4, 5, 6], 10)
    answers = {tuple(child.token_ids[len(branch) :]) for child in children}
    assert answers == {tuple(answer(branch, 9, seed=50 + i)) for i in range(3)} and len(answers) == 3
    cache.kv.check_integrity([parent, *children])


@pytest.mark.feature("003-27")
def test_without_a_block_for_the_copy_the_extension_is_refused_until_one_is_free() -> None:
    cache, parent, (child,) = forked(2, [1, 2, 3, 4, 5, 6])
    assert not cache.can_extend(child) and not cache.can_extend(parent)
    cache.release(parent)
    assert cache.can_extend(child)
    cache.run(child)
    cache.assert_content(child)


@pytest.mark.feature("003-27")
def test_two_writers_of_one_block_in_one_plan_need_one_copy() -> None:
    """The second finds the reference count that the first leaves behind."""
    cache, parent, (child,) = forked(3, [1, 2, 3, 4, 5, 6])
    plan = cache.kv.plan()
    assert plan.extend(child, 7) and plan.extend(parent, 7)
    assert len(cache.kv.commit(plan).copies) == 1
    cache.kv.check_integrity([parent, child])


@pytest.mark.feature("003-28")
@pytest.mark.parametrize("parent_first", [True, False])
def test_shared_blocks_come_back_with_the_last_sequence(parent_first: bool) -> None:
    cache, parent, (child,) = forked(4, [1, 2, 3, 4, 5, 6])
    first, last = (parent, child) if parent_first else (child, parent)
    cache.release(first)
    assert cache.kv.stats().used_num_blocks == 2
    cache.release(last)
    assert cache.kv.stats().used_num_blocks == 0
    cache.kv.check_integrity()


def test_a_paused_parent_and_a_paused_child_do_not_overwrite_each_other() -> None:
    cache, parent, (child,) = forked(8, [1, 2, 3, 4, 5, 6])
    cache.pause(parent)
    cache.generate(child, 1)  # writes position 6 of the block it shares with its parent
    cache.pause(child)
    cache.start(parent)
    cache.generate(parent, 1)  # writes its own position 6
    cache.pause(parent)
    for seq in (child, parent):
        cache.start(seq)
        cache.assert_content(seq)
    assert parent.token_ids[6:] == answer([1, 2, 3, 4, 5, 6], 2)
