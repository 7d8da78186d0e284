"""A sliding window: blocks that no later token reads are let go, and the table keeps a hole for each. Sink tokens stay."""

from __future__ import annotations

import msgspec
import pytest

from backend.api.request import RetentionConfig
from backend.core.sequence import Sequence
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


def used_and_gap(cache: Cache, seq: Sequence, num_steps: int) -> list[tuple[int, int, int]]:
    """(computed tokens, blocks in use, blocks let go) after each of some steps."""
    seen = []
    for _ in range(num_steps):
        cache.run(seq)
        seen.append((seq.num_computed_tokens, cache.kv.stats().used_num_blocks, cache.blocks(seq).count(-1)))
    return seen


@pytest.mark.feature("001-30", "003-22")
def test_sink_blocks_stay_and_the_gap_behind_them_grows() -> None:
    """Blocks of 4, a window of 6, 5 sink tokens: blocks 0 and 1 hold sink tokens.

    The token at position p attends to (p - 6, p]. Block 2 (positions 8 to 11) is last read by position 16, block 3 by 20.
    The prompt of 14 takes blocks 0 to 3; position 16 needs block 4, position 20 block 5, position 24 block 6.
    """
    cache = Cache(num_blocks=8, window=6, sink_tokens=5, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1] * 14))
    expected = [
        (14, 4, 0),
        (15, 4, 0),
        (16, 4, 0),
        (17, 4, 1),
        (18, 4, 1),
        (19, 4, 1),
        (20, 4, 1),
        (21, 4, 2),
        (22, 4, 2),
    ]
    assert used_and_gap(cache, seq, 9) == expected
    assert [block < 0 for block in cache.blocks(seq)] == [False, False, True, True, False, False]


@pytest.mark.feature("001-30", "003-22")
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("sink_tokens", [1, 3, 4, 5, 8])
def test_the_blocks_in_use_are_bounded_with_sink_tokens_too(window: int, sink_tokens: int) -> None:
    """At most the sink blocks, the window's, and one more because the window begins anywhere in a block."""
    cache = Cache(num_blocks=16, window=window, max_chunk_tokens=4, sink_tokens=sink_tokens, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    used = []
    for computed, blocks, _ in used_and_gap(cache, seq, 60):
        cache.kv.check_integrity([seq])
        used += [blocks] if computed > 40 else []
    assert max(used) <= -(-sink_tokens // 4) + -(-window // 4) + 1
    assert len(set(used)) <= 2, "from some point on it goes up and down by one"
    assert seq.token_ids[3:] == answer([1, 2, 3], 60, window=window, sink_tokens=sink_tokens)


@pytest.mark.parametrize("sink_tokens, needed", [(0, 5), (1, 6), (4, 6), (5, 7)])
def test_an_endless_sequence_needs_its_sink_blocks_besides(sink_tokens: int, needed: int) -> None:
    """A window of 4 and a chunk of 8 are 3 blocks, with two ragged ends 5."""
    for num_blocks, expected in ((needed, Admission.NOW), (needed - 1, Admission.NEVER)):
        cache = Cache(num_blocks=num_blocks, window=4, max_chunk_tokens=8, sink_tokens=sink_tokens)
        assert cache.kv.blocks_needed(10_000) == needed
        assert cache.kv.plan().admit(make_sequence(1, [1] * 10), 10_000, 0) is expected
    assert cache.kv.blocks_needed(9) == 3


def test_sink_tokens_without_a_window_change_nothing() -> None:
    cache = Cache(num_blocks=8, sink_tokens=5)
    assert cache.kv.blocks_needed(10_000) == 2500
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(seq, 20)
    assert cache.blocks(seq).count(-1) == 0


def grown(num_blocks: int = 8, **options: object) -> tuple[Cache, Sequence]:
    """Window 4, sink tokens 3, blocks of 4: 14 of 15 tokens computed, so block 1 is let go, then idle."""
    cache = Cache(num_blocks=num_blocks, window=4, sink_tokens=3, **options)
    seq = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(seq, 12)
    cache.release(seq, keep=True)
    assert [block < 0 for block in cache.blocks(seq)] == [False, True, False, False]
    return cache, seq


@pytest.mark.feature("001-30")
def test_a_returning_sequence_needs_its_sink_blocks_and_those_in_its_window() -> None:
    cache, seq = grown()
    cache.start(seq)
    assert seq.num_computed_tokens == 14
    assert cache.generate(seq, 3) == answer([1, 2, 3], 15, window=4, sink_tokens=3)[12:]


@pytest.mark.feature("001-30")
def test_a_sequence_that_has_lost_a_sink_block_is_computed_again() -> None:
    cache, seq = grown(num_blocks=6, enable_block_reuse=False)
    first, *_ = cache.blocks(seq)
    cache.kv.state.blocks.discard(first)
    cache.scramble_free_blocks()
    cache.start(seq)
    assert seq.num_computed_tokens == 0
    assert cache.generate(seq, 3) == answer([1, 2, 3], 15, window=4, sink_tokens=3)[12:]


@pytest.mark.feature("001-30")
@pytest.mark.parametrize("keep, found", [(3, 3), (6, 0), (10, 0), (11, 11), (13, 13)])
def test_a_rewind_finds_what_the_next_token_reads_or_computes_everything_again(keep: int, found: int) -> None:
    """Block 1 (positions 4 to 7) is gone. Position 3 reads block 0 alone, position 6 its own, 10 from 7 on, 11 from 8 on."""
    cache, seq = grown(enable_block_reuse=False)
    cache.kv.truncate(seq, keep)
    seq.truncate(keep)
    seq.token_ids += [70]
    history = list(seq.token_ids)
    cache.start(seq)
    assert seq.num_computed_tokens == found
    options = dict(window=4, sink_tokens=3, counter=seq.num_tokens - 3)
    assert cache.generate(seq, 2) == answer(history, 2, **options)


@pytest.mark.feature("001-30")
def test_a_prefix_that_is_found_is_taken_with_its_sink_block_and_without_the_gap() -> None:
    cache = Cache(num_blocks=10, window=4, sink_tokens=3)
    first = cache.start(make_sequence(1, list(range(13))))
    cache.run(first)
    cache.release(first)
    seq = cache.start(make_sequence(2, [*range(12), 50]))
    assert seq.num_computed_tokens == 12
    assert [block < 0 for block in cache.blocks(seq)] == [False, True, False, False]
    assert cache.generate(seq, 4) == answer([*range(12), 50], 4, window=4, sink_tokens=3)


@pytest.mark.feature("001-30")
def test_a_wish_to_keep_a_prompt_reaches_the_blocks_before_the_gap() -> None:
    """A sink block is worth as much as the blocks behind it, which are worth nothing without it."""
    cache = Cache(num_blocks=8, window=4, sink_tokens=3)
    seq = make_sequence(1, [1, 2, 3])
    seq.request = msgspec.structs.replace(seq.request, retention=RetentionConfig((), decode_priority=80))
    cache.start(seq)
    cache.generate(seq, 12)
    blocks = [cache.kv.state.blocks.blocks[block] for block in cache.blocks(seq) if block >= 0]
    cache.release(seq, keep=True)
    assert [block.priority for block in blocks] == [80, 80, 80]


@pytest.mark.feature("001-30", "003-22")
def test_blocks_that_were_let_go_are_promised_again() -> None:
    """Blocks of 4, a window of 6, chunks of 4, 5 sink tokens: 2 + 3 + 2 blocks at most. Of 22 tokens' 6 blocks 2 are let go."""
    cache = Cache(num_blocks=8, window=6, sink_tokens=5, max_chunk_tokens=4, enable_block_reuse=False)
    seq = cache.start(make_sequence(1, [1] * 4))
    assert cache.kv.num_growth_blocks(seq, 1000) == 7 - 1
    cache.generate(seq, 19)
    assert seq.num_computed_tokens == 22
    assert cache.kv.num_growth_blocks(seq, 1000) == 7 - 4
