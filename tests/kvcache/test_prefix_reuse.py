"""KV of a common prefix is shared between sequences, whole blocks by reference and the head of a block by copy."""

from __future__ import annotations

import pytest

from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, answer, make_sequence

PREFIX = list(range(10, 18))  # two blocks


def after_one(prompt: list[int], keep_running: bool = False, **options: object) -> tuple[Cache, list[int]]:
    """A cache in which a sequence with this prompt has been computed, and that sequence's block table."""
    cache = Cache(**options)
    seq = cache.start(make_sequence(1, prompt))
    cache.run(seq)
    table = cache.blocks(seq)
    if not keep_running:
        cache.release(seq)
    return cache, table


@pytest.mark.feature("001-33", "003-54", "002-51")
@pytest.mark.parametrize("keep_running", [True, False])
def test_a_second_sequence_finds_the_blocks_of_the_same_prefix(keep_running: bool) -> None:
    cache, table = after_one([*PREFIX, 1], keep_running)
    seq = cache.start(make_sequence(2, [*PREFIX, 2]))
    assert cache.blocks(seq)[:2] == table[:2] and cache.blocks(seq)[2] not in table[:2]
    assert (seq.num_computed_tokens, seq.num_reused_blocks, seq.num_new_blocks) == (8, 2, 1)
    assert cache.generate(seq, 6) == answer([*PREFIX, 2], 6)
    stats = cache.kv.stats()
    assert (stats.reused_blocks_total, stats.missed_blocks_total) == (2, 4)


@pytest.mark.feature("003-54")
@pytest.mark.parametrize("partial, cached", [(False, 0), (True, 3)])
def test_under_one_block_nothing_is_shared_and_with_partial_reuse_it_is_copied(partial: bool, cached: int) -> None:
    cache, table = after_one([1, 2, 3, 4], enable_partial_reuse=partial)
    seq = make_sequence(2, [1, 2, 3, 9, 9])
    cache.start(seq)
    assert seq.num_computed_tokens == cached and seq.num_reused_blocks == 0
    assert cache.copies == ([(table[0], cache.blocks(seq)[0])] if partial else [])
    assert cache.blocks(seq)[0] != table[0]
    assert cache.generate(seq, 5) == answer([1, 2, 3, 9, 9], 5)


@pytest.mark.feature("001-33")
def test_without_block_reuse_nothing_is_found() -> None:
    cache, _ = after_one([*PREFIX, 1], enable_block_reuse=False)
    assert cache.kv.stats().cached_num_blocks == 0
    seq = cache.start(make_sequence(2, [*PREFIX, 2]))
    assert (seq.num_computed_tokens, seq.num_reused_blocks) == (0, 0)
    assert cache.generate(seq, 3) == answer([*PREFIX, 2], 3)


def test_of_a_prompt_that_is_known_in_full_one_token_is_left_to_run() -> None:
    cache, table = after_one(PREFIX)
    seq = cache.start(make_sequence(2, PREFIX))
    assert seq.num_computed_tokens == 7
    assert cache.copies == [(table[1], cache.blocks(seq)[1])]  # position 7 is written again, but not there
    assert cache.generate(seq, 4) == answer(PREFIX, 4)


def test_the_block_that_holds_the_head_of_a_copy_keeps_its_own_content() -> None:
    cache, _ = after_one(PREFIX)
    copier = cache.start(make_sequence(2, [*PREFIX[:6], 70, 71]))
    cache.run(copier)
    again = cache.start(make_sequence(3, [*PREFIX, 3]))
    cache.assert_content(copier)
    cache.assert_content(again)
    assert cache.generate(again, 3) == answer([*PREFIX, 3], 3)


def test_different_namespaces_never_share() -> None:
    cache, table = after_one([*PREFIX, 1])
    seq = cache.start(make_sequence(2, [*PREFIX, 1], namespace="salt"))
    assert seq.num_computed_tokens == 0 and not set(cache.blocks(seq)) & set(table[:2])
    assert cache.generate(seq, 4) == answer([*PREFIX, 1], 4, namespace="salt") != answer([*PREFIX, 1], 4)


@pytest.mark.feature("002-51")
def test_generated_tokens_are_part_of_the_prefix_too() -> None:
    cache = Cache()
    first = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(first, 6)
    cache.release(first)
    seq = cache.start(make_sequence(2, [*first.token_ids, 40]))
    assert seq.num_computed_tokens == 8
    assert cache.generate(seq, 2) == answer([*first.token_ids, 40], 2)


def test_blocks_of_a_context_that_is_still_computed_are_found_once_they_are_full() -> None:
    cache = Cache()
    first = cache.start(make_sequence(1, [*PREFIX, 1]))
    cache.run(first, 5)
    assert cache.start(make_sequence(2, [*PREFIX, 2])).num_computed_tokens == 4


def test_eviction_shortens_a_prefix_from_its_tail() -> None:
    cache, table = after_one(list(range(16)), num_blocks=4)
    for evicted in range(1, 4):
        intruder = cache.start(make_sequence(10 + evicted, [100 * evicted] * 4 * evicted))
        assert cache.blocks(intruder) == list(reversed(table))[:evicted]
        known, _, _ = cache.kv.state.trie.match("", list(range(16)), 16)
        assert [handle.block_id for handle in known] == table[: 4 - evicted]
        cache.release(intruder)


def test_blocks_that_an_admission_has_found_are_not_evicted_by_it() -> None:
    cache, table = after_one(list(range(8)), num_blocks=4)
    seq = cache.start(make_sequence(2, [*range(8), *([50] * 8)]))
    assert cache.blocks(seq)[:2] == table
    assert cache.generate(seq, 1) == answer([*range(8), *([50] * 8)], 1)


def test_when_the_copy_of_a_head_does_not_fit_beside_its_source_the_head_is_computed_again() -> None:
    cache, _ = after_one([*range(8)], num_blocks=2)
    seq = make_sequence(2, [0, 1, 2, 3, 4, 5, 90])
    plan = cache.kv.plan()
    assert plan.admit(seq, 7, 0) is Admission.NOW
    assert plan.grants[2].copy_from is None and plan.grants[2].computed == 4
    cache.start(seq)
    assert cache.generate(seq, 1) == answer(seq.request.input_token_ids, 1)


def test_of_two_sequences_that_compute_the_same_blocks_the_first_ones_are_shared() -> None:
    cache = Cache(num_blocks=12)
    first, second = cache.start(make_sequence(1, [*PREFIX, 1])), cache.start(make_sequence(2, PREFIX))
    cache.run(first)
    cache.run(second)
    third = cache.start(make_sequence(3, [*PREFIX, 3]))
    assert cache.blocks(third)[:2] == cache.blocks(first)[:2] != cache.blocks(second)[:2]
    cache.release(second)
    assert cache.kv.stats().cached_num_blocks == 0  # nobody can ask for the second one's copies
    cache.kv.check_integrity([first, third])
