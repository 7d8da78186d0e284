"""How a sequence fills, keeps and gives back its blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, answer, make_sequence


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache(num_blocks=8, block_size=4)
    yield cache
    cache.kv.check_integrity()


@pytest.mark.feature("003-13", "003-15")
def test_token_ids_fill_the_blocks_of_the_table_in_order(cache: Cache) -> None:
    seq = cache.start(make_sequence(1, [11, 12, 13, 14, 15, 16]))
    assert len(cache.blocks(seq)) == 2
    cache.run(seq)
    cells = [cell for block_id in cache.blocks(seq) for cell in cache.workers.cells[block_id]]
    assert seq.num_computed_tokens == 6
    cache.assert_content(seq)
    assert len(set(cells[:6])) == 6
    cache.run(seq)
    after = [cell for block_id in cache.blocks(seq) for cell in cache.workers.cells[block_id]]
    assert after[:6] == cells[:6] and after[6] != cells[6] and after[7] == cells[7]


@pytest.mark.feature("003-13", "003-24")
def test_the_table_grows_by_one_block_exactly_when_the_last_one_is_full(cache: Cache) -> None:
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    lengths = []
    for _ in range(10):
        before = cache.blocks(seq)
        commit = cache.run(seq)
        assert cache.blocks(seq)[: len(before)] == before
        assert commit.copies == []
        lengths.append((seq.num_computed_tokens, len(cache.blocks(seq))))
    assert lengths == [(cells, -(-cells // 4)) for cells in range(3, 13)]
    assert seq.token_ids[3:] == answer([1, 2, 3], 10)


@pytest.mark.feature("003-25")
def test_room_in_a_block_of_its_own_costs_nothing(cache: Cache) -> None:
    seq = cache.start(make_sequence(1, [1, 2]))
    cache.run(seq)
    commit = cache.run(seq)
    assert commit.changes == {} and commit.copies == []
    assert cache.kv.stats().used_num_blocks == 1


def test_room_for_drafts_is_beside_the_room_that_is_planned_already(cache: Cache) -> None:
    """4 tokens fill a block, the next is the second block's, and drafts up to position 9 need a third: two in all. 12 more do not
    fit, and change nothing.
    """
    seq = cache.start(make_sequence(1, [1, 2, 3, 4]))
    cache.run(seq)
    plan = cache.kv.plan()
    assert plan.available == 7
    assert plan.extend(seq, 5) and plan.available == 6
    assert plan.widen(seq, 8) and plan.available == 6
    assert plan.widen(seq, 10) and plan.available == 5
    assert not plan.widen(seq, 33) and plan.available == 5
    cache.kv.commit(plan)
    assert len(cache.blocks(seq)) == 3


@pytest.mark.feature("003-21")
def test_admission_allocates_one_block_for_each_block_of_known_tokens() -> None:
    cache = Cache(num_blocks=8)
    for seq_id, tokens, blocks in ((1, 4, 1), (2, 5, 2), (3, 12, 3)):
        seq = cache.start(make_sequence(seq_id, [seq_id] * tokens))
        assert cache.ref_counts(seq) == [1] * blocks
        assert (seq.num_new_blocks, seq.num_reused_blocks) == (blocks, 0)
    assert (cache.kv.stats().used_num_blocks, cache.kv.stats().free_num_blocks) == (6, 2)


@pytest.mark.feature("003-21")
@pytest.mark.parametrize("sharers", [1, 3])
def test_a_shared_prefix_is_referenced_once_by_each_sequence(sharers: int) -> None:
    cache = Cache(num_blocks=8)
    prefix = [5] * 8
    first = cache.start(make_sequence(1, [*prefix, 1]))
    cache.run(first)
    others = [cache.start(make_sequence(i, [*prefix, i])) for i in range(2, 1 + sharers)]
    assert all(cache.blocks(seq)[:2] == cache.blocks(first)[:2] for seq in others)
    assert cache.ref_counts(first) == [sharers, sharers, 1]
    assert cache.kv.stats().used_num_blocks == 2 + sharers
    cache.kv.check_integrity([first, *others])


@pytest.mark.feature("003-23")
def test_an_extension_needs_a_free_block_only_at_a_block_boundary() -> None:
    cache = Cache(num_blocks=3, enable_block_reuse=False)
    grows = cache.start(make_sequence(1, [1] * 4))
    stays = cache.start(make_sequence(2, [2] * 6))
    cache.run(grows)
    cache.run(stays)
    assert not cache.can_extend(grows)
    assert cache.can_extend(stays)
    cache.release(stays)
    assert cache.can_extend(grows)


@pytest.mark.feature("003-23")
@pytest.mark.parametrize("free, granted", [(2, [True, True]), (1, [True, False]), (0, [False, False])])
def test_extensions_of_one_plan_share_what_is_free(free: int, granted: list[bool]) -> None:
    cache = Cache(num_blocks=2 + free, enable_block_reuse=False)
    pair = [cache.start(make_sequence(i, [i] * 4)) for i in (1, 2)]
    for seq in pair:
        cache.run(seq)
    plan = cache.kv.plan()
    assert [plan.extend(seq, 5) for seq in pair] == granted


def test_an_extension_that_is_refused_leaves_the_plan_usable() -> None:
    cache = Cache(num_blocks=4, enable_block_reuse=False)
    long, short = cache.start(make_sequence(1, [1] * 4)), cache.start(make_sequence(2, [2] * 4))
    cache.run(long)
    cache.run(short)
    plan = cache.kv.plan()
    assert not plan.extend(long, 16)
    assert plan.available == 2 and plan.grants == {}
    assert plan.extend(short, 12)
    assert plan.available == 0


@pytest.mark.feature("003-28")
def test_releasing_a_sequence_returns_all_its_blocks_and_forgets_its_table(cache: Cache) -> None:
    seq = cache.start(make_sequence(1, [1, 2, 3, 4, 5]))
    cache.release(seq)  # nothing was computed: nothing is worth keeping
    assert cache.kv.stats().free_num_blocks == 8
    assert seq.slot is None and cache.kv.state.slots.num_free == 4
    with pytest.raises(KeyError):
        cache.blocks(seq)
    cache.kv.release(seq, keep=False)  # for a second time: nothing happens
    assert cache.kv.stats().free_num_blocks == 8


@pytest.mark.feature("004-16")
def test_tables_are_kept_and_erased_by_sequence_id(cache: Cache) -> None:
    seq = cache.start(make_sequence(7, [1, 2, 3, 4, 5]))
    table = cache.blocks(seq)
    cache.run(seq)
    cache.release(seq, keep=True)
    same_id = make_sequence(7, [1, 2, 3, 4, 5])
    assert cache.blocks(same_id) == table
    cache.kv.release(same_id, keep=False)
    assert 7 not in cache.kv.state.tables
    assert cache.kv.num_evicted_blocks(same_id) == 0


def test_cutting_an_idle_sequence_lets_go_of_the_blocks_beyond() -> None:
    cache = Cache(num_blocks=8, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, list(range(14))))
    cache.run(seq)
    cache.release(seq, keep=True)
    assert cache.kv.stats().cached_num_blocks == 4
    cache.kv.truncate(seq, 5)
    seq.truncate(5)
    assert (len(cache.blocks(seq)), cache.kv.stats().cached_num_blocks) == (2, 2)
    seq.token_ids += [70, 71]
    cache.start(seq)
    assert seq.num_computed_tokens == 5
    cache.run(seq)
    cache.assert_content(seq)


def test_a_running_sequence_cannot_be_cut(cache: Cache) -> None:
    seq = cache.start(make_sequence(1, [1, 2, 3, 4, 5]))
    with pytest.raises(AssertionError, match="is running and cannot be cut"):
        cache.kv.truncate(seq, 2)
    assert len(cache.blocks(seq)) == 2


def test_integrity_names_the_block_whose_references_do_not_add_up() -> None:
    cache = Cache()
    seq = cache.start(make_sequence(1, [1]))
    cache.kv.state.blocks.lock(cache.blocks(seq)[0])
    with pytest.raises(AssertionError, match=f"block {cache.blocks(seq)[0]}: ref_count 2 != 1 tables"):
        cache.kv.check_integrity([seq])


@pytest.mark.feature("003-15")
def test_a_worker_is_told_a_whole_table_once_and_then_only_what_is_new(cache: Cache) -> None:
    seq = make_sequence(1, [1, 2, 3, 4])
    plan = cache.kv.plan()
    assert plan.admit(seq, 4, 0) is Admission.NOW
    change = cache.kv.commit(plan).changes[1]
    assert change.is_new and change.slot == seq.slot == 0
    seq.num_computed_tokens = 4
    cache.kv.advance(seq)
    plan = cache.kv.plan()
    assert plan.extend(seq, 13)
    change = cache.kv.commit(plan).changes[1]
    assert not change.is_new and change.new_block_ids == cache.blocks(seq)[1:] and len(change.new_block_ids) == 3
