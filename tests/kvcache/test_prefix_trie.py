"""Which blocks a prefix finds, and what is forgotten with a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.prefix_trie import PrefixTrie


def handles(*block_ids: int) -> list[BlockHandle]:
    return [BlockHandle(block_id, 100 + block_id) for block_id in block_ids]


def trie_of(tokens: list[int], *block_ids: int, size: int = 2, namespace: str = "") -> PrefixTrie:
    trie = PrefixTrie(size, EvictedPrefixes(64))
    trie.insert(namespace, None, 0, tokens, handles(*block_ids), len(block_ids))
    return trie


def found(
    trie: PrefixTrie, tokens: list[int], namespace: str = "", limit: int | None = None
) -> tuple[list[int], int | None, int]:
    blocks, partial, matched = trie.match(namespace, tokens, len(tokens) if limit is None else limit)
    return [handle.block_id for handle in blocks], partial.block_id if partial else None, matched


@pytest.mark.feature("003-54")
def test_the_same_prefix_finds_the_same_blocks() -> None:
    trie = trie_of([1, 2, 3, 4], 7, 8)
    assert found(trie, [1, 2, 3, 4, 5]) == ([7, 8], None, 0)
    assert found(trie, [1, 2, 9, 9]) == ([7], None, 0)
    assert found(trie, [2, 1]) == ([], None, 0)


@pytest.mark.feature("003-54")
def test_a_prefix_is_cut_to_whole_blocks_and_the_rest_is_a_partial_match() -> None:
    trie = trie_of([1, 2, 3, 4, 5, 6], 7, 8, size=3)
    assert found(trie, [1, 2]) == ([], 7, 2)
    assert found(trie, [1, 2, 3, 4, 9]) == ([7], 8, 1)
    assert found(trie, [1, 2, 3, 4, 5, 6], limit=5) == ([7], 8, 2)


def test_of_several_partial_matches_the_longest_wins() -> None:
    trie = trie_of([1, 2, 3, 4], 1, size=4)
    trie.insert("", None, 0, [1, 2, 9, 9], handles(2), 1)
    trie.insert("", None, 0, [1, 7, 7, 7], handles(3), 1)
    assert found(trie, [1, 2, 9, 0]) == ([], 2, 3)
    assert found(trie, [1, 7]) == ([], 3, 2)


class Colliding(int):
    """A token id whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


def test_tokens_are_compared_not_their_hashes() -> None:
    tokens = [Colliding(i) for i in range(4)]
    trie = trie_of(tokens[:2], 1)
    trie.insert("", None, 0, tokens[2:], handles(2), 1)
    assert hash(tuple(tokens[:2])) == hash(tuple(tokens[2:]))
    assert found(trie, tokens[:2]) == ([1], None, 0)
    assert found(trie, tokens[2:]) == ([2], None, 0)
    assert found(trie, [tokens[3], tokens[0]]) == ([], None, 0)


def test_equal_blocks_behind_different_prefixes_are_different_blocks() -> None:
    trie = trie_of([1, 1, 5, 5], 1, 2)
    trie.insert("", None, 0, [2, 2, 5, 5], handles(3, 4), 2)
    assert found(trie, [1, 1, 5, 5]) == ([1, 2], None, 0)
    assert found(trie, [2, 2, 5, 5]) == ([3, 4], None, 0)
    assert found(trie, [5, 5]) == ([], None, 0)


def test_a_namespace_is_never_shared() -> None:
    trie = trie_of([1, 2], 1, namespace="a")
    trie.insert("b", None, 0, [1, 2], handles(2), 1)
    assert found(trie, [1, 2], "a") == ([1], None, 0)
    assert found(trie, [1, 2], "b") == ([2], None, 0)
    assert found(trie, [1, 2], "") == ([], None, 0)


def test_a_block_of_known_tokens_is_not_entered_twice() -> None:
    trie = trie_of([1, 2], 1)
    node, depth = trie.insert("", None, 0, [1, 2, 3, 4], handles(5, 6), 2)
    assert found(trie, [1, 2, 3, 4]) == ([1, 6], None, 0)
    assert not trie.holds(5) and depth == 2 and trie.is_attached(node)


def test_forgetting_a_block_cuts_off_all_below_it() -> None:
    trie = trie_of([1, 1, 2, 2, 3, 3], 1, 2, 3)
    trie.insert("", None, 0, [1, 1, 4, 4], handles(1, 4), 2)
    trie.forget(2)
    assert [block_id for block_id in (1, 2, 3, 4) if trie.holds(block_id)] == [1, 4]
    assert found(trie, [1, 1, 2, 2, 3, 3]) == ([1], None, 0)
    trie.check_integrity()
    trie.forget(99)
    trie.forget(1)
    assert len(trie) == 0
    trie.check_integrity()


def test_going_on_below_a_node_that_was_cut_off_starts_at_the_root_again() -> None:
    trie = PrefixTrie(2, EvictedPrefixes(64))
    tokens, table = [1, 1, 2, 2, 3, 3], handles(1, 2, 3)
    node, depth = trie.insert("", None, 0, tokens, table, 2)
    trie.forget(1)
    assert not trie.is_attached(node)
    trie.insert("", node, depth, tokens, table, 3)
    assert found(trie, tokens) == ([1, 2, 3], None, 0)
    trie.check_integrity()


def test_a_path_with_a_hole_is_not_entered() -> None:
    trie = PrefixTrie(2, EvictedPrefixes(64))
    assert trie.insert("", None, 0, [1, 1, 2, 2], [DROPPED, *handles(2)], 2) == (None, 0)
    assert found(trie, [1, 1, 2, 2]) == ([], None, 0)
    trie.check_integrity()


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), max_size=12)


@given(prompts=PROMPTS, forgotten=st.lists(st.integers(0, 40)), wanted=st.lists(st.integers(0, 2), max_size=9))
def test_what_is_found_is_the_longest_known_prefix(
    prompts: list[list[int]], forgotten: list[int], wanted: list[int]
) -> None:
    """Against a plain dictionary from prefixes to blocks."""
    size, trie, known = 2, PrefixTrie(2, EvictedPrefixes(64)), {}
    for number, prompt in enumerate(prompts):
        table = handles(*range(number * 10, number * 10 + len(prompt) // size))
        trie.insert("", None, 0, prompt, table, len(table))
        for index, handle in enumerate(table):
            known.setdefault(tuple(prompt[: (index + 1) * size]), handle.block_id)
    for block_id in forgotten:
        trie.forget(block_id)
        lost = [path for path, number in known.items() if number == block_id]
        known = {path: number for path, number in known.items() if not any(path[: len(cut)] == cut for cut in lost)}
    trie.check_integrity()
    blocks, partial, matched = found(trie, wanted)
    expected = []
    while (path := tuple(wanted[: (len(expected) + 1) * size])) in known and len(path) == (len(expected) + 1) * size:
        expected.append(known[path])
    assert blocks == expected
    start = len(expected) * size
    children = [path for path in known if len(path) == start + size and list(path[:start]) == wanted[:start]]
    head = max((sum(1 for _ in _common(path[start:], wanted[start:])) for path in children), default=0)
    assert matched == head and (partial is not None) == (head > 0)


def _common(left: Iterable[int], right: Iterable[int]) -> Iterator[int]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return
        yield a


class Counted(int):
    """A token id that counts how often one is compared."""

    comparisons = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__lt__(self, other)


@pytest.mark.parametrize("fan_out", [1, 100, 10_000])
def test_a_lookup_costs_the_same_however_many_continuations_a_prefix_has(fan_out: int) -> None:
    trie = PrefixTrie(4, EvictedPrefixes(64))
    for index in range(fan_out):
        trie.insert("", None, 0, [5, index, 0, 0], [BlockHandle(index, 1)], 1)
    Counted.comparisons = 0
    tokens = [Counted(token) for token in (5, fan_out // 2, 0, 9, 9)]
    assert found(trie, tokens) == ([], fan_out // 2, 3)
    assert Counted.comparisons <= 4 * (fan_out.bit_length() + 4)
    trie.check_integrity()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=12, unique_by=tuple),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.data(),
)
def test_the_longest_head_is_found_among_any_neighbours_and_after_any_eviction(
    keys: list[list[int]], tail: list[int], data: st.DataObject
) -> None:
    trie = PrefixTrie(4, EvictedPrefixes(64))
    for index, key in enumerate(keys):
        trie.insert("", None, 0, key, [BlockHandle(index, 1)], 1)
    gone = data.draw(st.sets(st.integers(0, max(0, len(keys) - 1))))
    for index in gone:
        trie.forget(index)
    trie.check_integrity()

    def common(key: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(key, tail)) if a != b), len(tail))

    left = [key for index, key in enumerate(keys) if index not in gone and key != tail]
    if tail not in [key for index, key in enumerate(keys) if index not in gone]:
        _, block, matched = found(trie, tail)
        assert matched == max(map(common, left), default=0)
        assert (block is None) == (matched == 0) and (block is None or common(keys[block]) == matched)
