"""The cache of KV caches: idle sequences keep their KV until somebody needs the blocks; token ids are never lost."""

from __future__ import annotations

import pytest

from backend.core.sequence import Sequence
from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, answer, make_sequence


def idle(cache: Cache, seq_id: int, num_tokens: int = 3) -> Sequence:
    """A sequence that has computed `num_tokens` tokens and rests."""
    seq = cache.start(make_sequence(seq_id, [seq_id] * num_tokens))
    cache.run(seq)
    cache.release(seq, keep=True)
    return seq


def touch(cache: Cache, seq: Sequence) -> None:
    cache.start(seq)
    cache.release(seq, keep=True)


@pytest.mark.feature("004-10")
def test_the_least_recently_used_idle_sequence_loses_its_kv() -> None:
    cache = Cache(num_blocks=3)
    a, b, c = (idle(cache, seq_id) for seq_id in (1, 2, 3))
    assert cache.kv.stats().cached_num_blocks == 3
    touch(cache, a)
    d = cache.start(make_sequence(4, [4] * 4))
    assert cache.blocks(d) == cache.blocks(b)
    assert [cache.kv.num_evicted_blocks(seq) for seq in (a, b, c)] == [0, 1, 0]


@pytest.mark.feature("004-13")
def test_an_evicted_sequence_is_reduced_to_its_token_ids_and_answers_as_if_nothing_had_happened() -> None:
    cache = Cache(num_blocks=3)
    seq = cache.start(make_sequence(1, [1, 2, 3, 4, 5]))
    cache.generate(seq, 5)
    cache.release(seq, keep=True)
    tokens, table = list(seq.token_ids), cache.blocks(seq)
    intruder = cache.start(make_sequence(2, [9] * 12))
    cache.run(intruder)
    assert sorted(cache.blocks(intruder)) == sorted(table)  # its memory is used again
    assert seq.token_ids == tokens and cache.kv.num_evicted_blocks(seq) == 3
    cache.release(intruder)
    cache.start(seq)
    assert seq.num_computed_tokens == 0
    assert cache.generate(seq, 1) == answer([1, 2, 3, 4, 5], 6)[5:]
    cache.assert_content(seq)


@pytest.mark.feature("004-12")
def test_a_returning_sequence_finds_the_very_cells_it_left() -> None:
    cache = Cache(num_blocks=6)
    seq = cache.start(make_sequence(1, [1, 2, 3, 4, 5]))
    cache.generate(seq, 2)
    cache.release(seq, keep=True)
    table = cache.blocks(seq)
    cells = [list(cache.workers.cells[block_id]) for block_id in table]
    cache.run(cache.start(make_sequence(2, [9] * 4)))
    cache.start(seq)
    assert cache.blocks(seq) == table and [cache.workers.cells[block_id] for block_id in table] == cells
    assert seq.num_computed_tokens == 6 and cache.copies == []
    assert cache.kv.stats().reused_blocks_total == 2


@pytest.mark.feature("004-11")
def test_a_running_sequence_is_never_evicted_and_who_finds_no_room_waits() -> None:
    cache = Cache(num_blocks=3, slots=4)
    running = [cache.start(make_sequence(i, [i] * 3)) for i in (1, 2, 3)]
    for seq in running:
        cache.run(seq)
    assert cache.judge(make_sequence(4, [4])) is Admission.LATER
    for seq in running:
        cache.assert_content(seq)
        assert cache.generate(seq, 1) == answer(seq.request.input_token_ids, 2)[1:]


@pytest.mark.feature("004-13")
def test_a_sequence_that_lost_its_tail_goes_on_from_what_survived() -> None:
    cache = Cache(num_blocks=5, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, list(range(16))))
    cache.run(seq)
    cache.pause(seq)
    intruder = cache.start(make_sequence(2, [9] * 12))
    assert cache.kv.num_evicted_blocks(seq) == 2
    cache.release(intruder)
    cache.start(seq)
    assert seq.num_computed_tokens == 8
    assert cache.generate(seq, 3) == answer(list(range(16)), 4)[1:]


def test_a_paused_sequence_of_which_nothing_was_evicted_computes_nothing_again() -> None:
    cache = Cache(num_blocks=4)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(seq, 3)
    cache.pause(seq)
    assert cache.kv.stats().used_num_blocks == 0 and seq.slot is None
    cache.start(seq)
    assert seq.num_computed_tokens == 5
    assert cache.generate(seq, 2) == answer([1, 2, 3], 5)[3:]


@pytest.mark.feature("004-07")
def test_when_everything_is_lost_no_table_is_believed_any_more() -> None:
    cache = Cache(num_blocks=6)
    sleepers = [idle(cache, 1, 5), idle(cache, 2, 5)]
    cache.kv.lose_everything()
    cache.workers.cells = [[-1] * 4 for _ in cache.workers.cells]
    assert cache.kv.stats().free_num_blocks == 6
    for seq in sleepers:
        assert cache.start(seq).num_computed_tokens == 0
        assert cache.generate(seq, 1) == answer(seq.request.input_token_ids, 2)[1:]
    cache.kv.check_integrity(sleepers)


@pytest.mark.feature("004-09")
@pytest.mark.parametrize("chunk, grown, backed", [(-1, 1, 10), (1, 7, 7), (3, 3, 9), (0, 3, 9)])
def test_workers_are_asked_for_memory_once_for_each_chunk(chunk: int, grown: int, backed: int) -> None:
    """Seven blocks are used, one after the other, of a pool of ten (whose square root is three)."""
    cache = Cache(num_blocks=10, chunk_blocks=chunk)
    seq = cache.start(make_sequence(1, [1] * 4))
    cache.generate(seq, 25)
    assert (cache.workers.num_grown, cache.workers.num_backed) == (grown, backed)
    assert cache.kv.stats().allocated_num_blocks == backed
    cache.assert_content(seq)


def test_a_block_that_was_shared_once_is_private_again_for_new_content() -> None:
    """Otherwise whoever rests in the middle of it pays for a copy, and a block more, at each return."""
    cache = Cache(num_blocks=2)
    first = cache.start(make_sequence(1, [1, 2, 3, 4]))
    cache.run(first)  # its block is full: others may find it
    cache.release(first)
    seq = cache.start(make_sequence(2, [5, 6, 7, 8, 9]))  # takes both blocks
    cache.run(seq)
    cache.release(seq, keep=True)
    cache.start(seq)
    assert seq.num_computed_tokens == 5 and cache.copies == []
    assert cache.generate(seq, 2) == answer([5, 6, 7, 8, 9], 3)[1:]
