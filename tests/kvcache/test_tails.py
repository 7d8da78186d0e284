"""A last block that never became full is found from the end of its sequence on, and is copied by those who go on from it.

In these tests a block has four tokens, and the newest token of a sequence is never computed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import Request
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.api.stats import BlocksRemoved, BlocksStored, BlockUpdated
from backend.core.group import SequenceGroup
from backend.core.sequence import Sequence
from backend.core.step import BlockId
from backend.kvcache.block import BlockHandle
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.plan import Admission
from backend.kvcache.prefix_trie import PrefixTrie
from tests.kvcache.harness import Cache, answer, make_sequence

PROMPT = [1, 2, 3, 4, 5, 6]  # a block, and two tokens of another
MORE = [*PROMPT, 70, 71]


def ended(namespace: str = "", prompt: list[int] = PROMPT, keep: bool = False, **options: object) -> Cache:
    """A cache in which a sequence with this prompt was computed and has left."""
    cache = Cache(**options)
    seq = cache.start(make_sequence(1, prompt, namespace=namespace))
    cache.run(seq)
    cache.release(seq, keep)
    return cache


def found(cache: Cache, prompt: list[int], seq_id: int = 2) -> int:
    """How many leading tokens of a prompt an admission would find."""
    plan = cache.kv.plan()
    seq = make_sequence(seq_id, prompt)
    assert plan.admit(seq, seq.num_tokens, 0) is Admission.NOW
    return plan.grants[seq_id].computed


@pytest.mark.feature("000-60", "002-51")
def test_a_request_that_goes_on_from_another_ones_output_computes_nothing_of_it_again() -> None:
    """The first has 3 + 4 = 7 tokens, of which 6 are computed: a block, and two tokens of the next. The second one's 7 + 1 tokens
    take two blocks: one is shared, the other begins as a copy, so that two tokens are left to run.
    """
    cache = Cache()
    first = cache.start(make_sequence(1, [1, 2, 3]))
    cache.generate(first, 4)
    left = cache.blocks(first)
    cache.release(first)
    assert cache.kv.stats().cached_num_blocks == 2
    prompt = [*first.token_ids, 70]
    second = cache.start(make_sequence(2, prompt))
    assert second.num_computed_tokens == 6
    assert (second.num_reused_blocks, second.num_new_blocks, second.num_copied_blocks) == (1, 1, 1)
    assert cache.blocks(second)[0] == left[0] and cache.copies == [(left[1], cache.blocks(second)[1])]
    cache.scramble_free_blocks()
    assert cache.generate(second, 6) == answer(prompt, 6)
    cache.kv.check_integrity([second])


@pytest.mark.feature("000-60")
def test_a_block_that_many_go_on_from_keeps_what_it_holds() -> None:
    cache = ended(num_blocks=12)
    prompts = [[*PROMPT, number, number] for number in (70, 80, 90)]
    takers = [cache.start(make_sequence(2 + i, prompt)) for i, prompt in enumerate(prompts)]
    for seq, prompt in zip(takers, prompts, strict=True):
        assert seq.num_computed_tokens == 6 and cache.generate(seq, 3) == answer(prompt, 3)
        cache.assert_content(seq)


def test_of_a_last_block_the_longest_common_head_is_found() -> None:
    cache = ended(prompt=[1, 2, 3, 4, 5, 6, 7])
    assert found(cache, [1, 2, 3, 4, 5, 6, 9, 9]) == 6
    assert found(cache, [1, 2, 3, 4, 5, 6]) == 5, "one token is left to run"
    assert found(cache, [1, 2, 3, 4, 9, 9]) == 4
    assert found(cache, [5, 6, 7, 8]) == 0


@pytest.mark.parametrize(
    "options, namespace, expected",
    [
        ({"sharing": "namespace"}, "", (4, 1)),
        ({"sharing": "namespace"}, "team", (6, 2)),
        ({"sharing": "none"}, "team", (0, 0)),
        ({"enable_partial_reuse": False}, "", (4, 1)),
        ({"enable_block_reuse": False}, "", (0, 0)),
    ],
)
def test_a_last_block_is_kept_for_those_only_who_find_heads(
    options: dict[str, object], namespace: str, expected: tuple[int, int]
) -> None:
    """Expected: (tokens found, blocks cached). What nobody would find is free at once."""
    cache = ended(namespace, **options)
    seq = make_sequence(2, MORE, namespace=namespace)
    plan = cache.kv.plan()
    plan.admit(seq, seq.num_tokens, 0)
    assert (plan.grants[2].computed, cache.kv.stats().cached_num_blocks) == expected


def test_another_namespace_does_not_find_it() -> None:
    assert found(ended("team"), MORE) == 0


def test_a_sequence_that_returns_keeps_its_last_block_to_itself() -> None:
    """Its return writes there without a copy, so others must not find it meanwhile."""
    cache = Cache()
    seq = cache.start(make_sequence(1, PROMPT))
    cache.run(seq)
    cache.release(seq, keep=True)
    assert found(cache, MORE) == 4
    cache.start(seq)
    assert cache.copies == [] and cache.generate(seq, 3) == answer(PROMPT, 4)[1:]


def test_a_block_that_another_one_goes_on_to_write_is_found_when_that_one_has_filled_it() -> None:
    cache = Cache(num_blocks=12)
    parent = cache.start(make_sequence(1, PROMPT))
    cache.run(parent)
    child = cache.fork(parent, 2, seed=5)
    cache.release(parent)
    assert found(cache, MORE, 3) == 4
    cache.generate(child, 2)
    assert found(cache, [*child.token_ids[:8], 9], 3) == 8
    cache.kv.check_integrity([child])


def test_what_stands_in_the_last_block_of_a_hypothesis_is_not_found() -> None:
    cache = Cache()
    seq = cache.start(make_sequence(1, PROMPT))
    cache.run(seq)
    seq.group = SequenceGroup(beam_width=2)
    cache.release(seq)
    assert found(cache, MORE) == 4 and cache.kv.stats().cached_num_blocks == 1


def test_a_last_block_is_given_up_before_the_block_ahead_of_it() -> None:
    """Two of four blocks are free: the third intruder takes the last block, the fourth the one ahead of it."""
    cache, left = ended(num_blocks=4), []
    for number in range(1, 5):
        cache.start(make_sequence(number + 1, [100 * number]))
        whole, _, num_tail_tokens = cache.kv.state.trie.match("", MORE, 8)
        left.append((len(whole), num_tail_tokens))
    assert left == [(1, 2), (1, 2), (1, 0), (0, 0)]


def retained(seq_id: int, prompt: list[int]) -> Sequence:
    """A sequence whose blocks are to be kept with priority 90."""
    retention = RetentionConfig((TokenRangeRetention(0, None, 90, None),), decode_priority=90)
    return Sequence(seq_id, seq_id, Request(prompt, 16, retention=retention), seq_id, 0)


def test_a_priority_holds_for_the_last_block_too() -> None:
    """Six blocks: the first sequence's two outlive three others that take two each."""
    cache = Cache(num_blocks=6)
    others = [make_sequence(number, [number * 100 + i for i in range(7)]) for number in (2, 3, 4)]
    for seq in [retained(1, PROMPT), *others]:
        cache.run(cache.start(seq))
        cache.release(seq)
    assert cache.kv.state.trie.match("", MORE, 8)[2] == 2


@pytest.mark.feature("000-61")
def test_events_tell_the_tokens_of_a_last_block_then_its_priority_and_that_it_is_gone() -> None:
    cache = Cache(num_blocks=4, max_events=100)
    seq = cache.start(retained(1, PROMPT))
    cache.run(seq)
    _, full = (event.data for event in cache.kv.take_events())
    cache.release(seq)
    stored, *updates = (event.data for event in cache.kv.take_events())
    assert isinstance(stored, BlocksStored) and stored.parent_hash == full.blocks[0].block_hash
    (tail,) = stored.blocks
    assert tail.token_ids == [5, 6]
    assert updates == [BlockUpdated(tail.block_hash, 90), BlockUpdated(full.blocks[0].block_hash, 90)]
    cache.start(make_sequence(2, [9] * 12))
    assert [event.data for event in cache.kv.take_events()] == [BlocksRemoved([tail.block_hash])]


def test_behind_a_window_a_last_block_is_found_with_the_blocks_that_it_needs() -> None:
    """18 tokens fill four blocks and half of a fifth. The token at position 18 attends to positions 13 to 18, and block 4 is
    copied, so that of the others block 3 is needed. What is found ends with a full block first: the token at position 16 attends
    to positions 11 to 16, so blocks 0 and 1 are let go.
    """
    prompt = list(range(1, 19))
    cache = ended(prompt=prompt, num_blocks=16, window=6)
    seq = cache.start(make_sequence(2, [*prompt, 70]))
    assert seq.num_computed_tokens == 18 and cache.blocks(seq)[:2] == [-1, -1]
    cache.scramble_free_blocks()
    cache.assert_content(seq)
    assert cache.generate(seq, 8) == answer([*prompt, 70], 8, window=6)


class TestTrie:
    def test_a_leaf_that_another_block_begins_with_is_not_entered(self) -> None:
        trie = PrefixTrie(4, EvictedPrefixes(64))
        trie.insert("", None, 0, [1, 2, 3, 4], handles(1), 1)
        trie.insert_tail("", None, 0, [1, 2, 3], handles(2), 3)
        trie.insert_tail("", None, 0, [1, 2, 9], handles(3), 3)
        trie.insert_tail("", None, 0, [1, 2], handles(4), 2)
        assert [trie.holds(BlockId(i)) for i in range(1, 5)] == [True, False, True, False]
        trie.check_integrity()

    def test_a_leaf_goes_with_the_block_ahead_of_it_and_an_empty_namespace_is_forgotten(self) -> None:
        trie = PrefixTrie(2, EvictedPrefixes(64))
        trie.insert_tail("", None, 0, [1, 2, 3], handles(1, 2), 3)
        trie.insert_tail("other", None, 0, [7], handles(3), 1)
        assert len(trie) == 3
        trie.forget(BlockId(1))
        trie.forget(BlockId(3))
        assert len(trie) == 0
        trie.check_integrity()

    @given(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
    )
    def test_the_longest_head_is_found_among_keys_of_any_lengths(
        self, keys: list[list[int]], wanted: list[int]
    ) -> None:
        trie = PrefixTrie(4, EvictedPrefixes(64))
        for index, key in enumerate(keys):
            if len(key) < 4:
                trie.insert_tail("", None, 0, key, handles(index), len(key))
            else:
                trie.insert("", None, 0, key, handles(index), 1)
            trie.check_integrity()

        def common(key: list[int]) -> int:
            return next((i for i, (a, b) in enumerate(zip(key, wanted)) if a != b), min(len(key), len(wanted)))

        whole, block, matched = trie.match("", wanted, len(wanted))
        assert whole == [] and matched == max(map(common, keys), default=0)
        assert common(keys[block.block_id]) == matched if block else matched == 0


def handles(*block_ids: int) -> list[BlockHandle]:
    return [BlockHandle(BlockId(block_id), 100 + block_id) for block_id in block_ids]
