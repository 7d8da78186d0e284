"""A sliding window: blocks that no later token reads are let go, and the table keeps a hole for each."""

from __future__ import annotations

import pytest

from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, answer, make_sequence


@pytest.mark.feature("003-22")
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
def test_the_blocks_in_use_are_bounded_however_long_the_sequence_grows(window: int) -> None:
    cache = Cache(num_blocks=16, window=window, max_chunk_tokens=4, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    used = []
    for _ in range(60):
        cache.run(seq)
        cache.kv.check_integrity([seq])
        used.append(cache.kv.stats().used_num_blocks)
    assert max(used) <= -(-window // 4) + 1
    assert len(cache.blocks(seq)) == 16 and cache.blocks(seq)[0] == -1
    assert seq.token_ids[3:] == answer([1, 2, 3], 60, window=window)


@pytest.mark.feature("003-22")
def test_a_block_is_let_go_as_soon_as_no_later_token_reads_it() -> None:
    """The token at position p attends to (p - 6, p]: block 0 (positions 0 to 3) is last read by position 8."""
    cache = Cache(num_blocks=8, window=6, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1] * 8))
    cache.run(seq)
    holes = []
    for _ in range(6):
        cache.run(seq)
        holes.append((seq.num_computed_tokens, cache.blocks(seq).count(-1)))
    assert holes == [(9, 1), (10, 1), (11, 1), (12, 1), (13, 2), (14, 2)]


@pytest.mark.feature("003-22")
def test_a_prompt_far_longer_than_the_pool_is_admitted_by_chunks() -> None:
    cache = Cache(num_blocks=6, window=4, max_chunk_tokens=8, enable_block_reuse=False)
    prompt = list(range(100))
    seq = cache.start(make_sequence(1, prompt))
    assert len(cache.blocks(seq)) == 2
    for start in range(0, 100, 8):
        cache.run(seq, min(8, 100 - start))
        assert cache.kv.stats().used_num_blocks <= 4
    assert seq.token_ids[100:] == answer(prompt, 1, window=4)


@pytest.mark.parametrize("num_blocks, expected", [(5, Admission.NOW), (4, Admission.NEVER)])
def test_the_need_of_an_endless_sequence_is_the_window_a_chunk_and_two_ragged_ends(
    num_blocks: int, expected: Admission
) -> None:
    cache = Cache(num_blocks=num_blocks, window=4, max_chunk_tokens=8)
    assert cache.kv.blocks_needed(10_000) == 5
    assert cache.kv.plan().admit(make_sequence(1, [1] * 10), 10_000, 0) is expected


def test_a_returning_sequence_needs_only_the_blocks_in_its_window() -> None:
    cache = Cache(num_blocks=8, window=4)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(seq, 12)
    cache.release(seq, keep=True)
    assert cache.blocks(seq)[:2] == [-1, -1]
    cache.start(seq)
    assert seq.num_computed_tokens == 14
    assert cache.generate(seq, 3) == answer([1, 2, 3], 15, window=4)[12:]


def test_a_rewind_to_where_the_window_is_gone_computes_everything_again() -> None:
    cache = Cache(num_blocks=8, window=4, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(seq, 12)
    cache.release(seq, keep=True)
    cache.kv.truncate(seq, 9)
    seq.truncate(9)
    seq.token_ids += [70, 71]
    history = list(seq.token_ids)
    cache.start(seq)
    assert seq.num_computed_tokens == 0
    assert cache.generate(seq, 2) == answer(history, 2, window=4, counter=8)


def test_a_prefix_that_is_found_is_taken_without_the_blocks_outside_the_window() -> None:
    cache = Cache(num_blocks=10, window=4)
    first = cache.start(make_sequence(1, list(range(13))))
    cache.run(first)
    cache.release(first)
    seq = cache.start(make_sequence(2, [*range(12), 50]))
    assert (seq.num_computed_tokens, cache.blocks(seq).count(-1)) == (12, 2)
    assert cache.generate(seq, 4) == answer([*range(12), 50], 4, window=4)


@pytest.mark.feature("003-26")
@pytest.mark.parametrize("together", [False, True])
def test_two_idle_sequences_that_share_a_block_the_trie_has_forgotten_do_not_write_to_it(together: bool) -> None:
    """The front of the prefix has left both windows and is evicted, which cuts the shared tail off the trie."""
    cache = Cache(num_blocks=12, window=8)
    common = list(range(16))
    pair = [make_sequence(1, [*common, 21]), make_sequence(2, [*common, 31])]
    for seq in pair:
        cache.run(cache.start(seq))
        cache.release(seq, keep=True)
    first, second = pair
    assert cache.blocks(first)[:4] == cache.blocks(second)[:4]
    shared = cache.blocks(first)[3]
    intruder = cache.start(make_sequence(3, [9] * 28))
    cache.release(intruder)
    assert not cache.kv.state.trie.holds(shared) and cache.kv.num_evicted_blocks(second) == 0
    cache.kv.truncate(first, 15)
    first.truncate(15)
    first.token_ids += [77]
    if together:
        cache.start_together(first, second)
    else:
        cache.start(first)
    cache.run(first)
    cache.assert_content(first)
    if not together:
        cache.release(first, keep=True)
        cache.start(second)
    cache.assert_content(second)
    assert cache.generate(second, 3) == answer([*common, 31], 4, window=8)[1:]
