"""Events of the cache: whoever replays them knows what can be found."""

from __future__ import annotations

import random

import pytest

from backend.api.lora import LoraConfig
from backend.api.request import Request
from backend.api.stats import BlocksCreated, BlocksRemoved, BlocksStored, KvEvent
from backend.core.sequence import Sequence
from backend.core.step import BlockId
from backend.kvcache.block import BlockHandle
from backend.kvcache.events import KvEventLog, block_hash, root_hash
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.prefix_trie import PrefixTrie
from tests.kvcache.harness import Cache, make_sequence

pytestmark = pytest.mark.feature("000-61")


class Replay:
    """What a router knows that has read all events so far: the findable blocks, by hash, and the tokens up to their ends."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.num_events = 0

    def read(self, events: list[KvEvent]) -> None:
        for event in events:
            assert event.event_id == self.num_events
            self.num_events += 1
            match event.data:
                case BlocksStored(parent_hash, blocks):
                    before = () if parent_hash is None else self.prefixes[parent_hash]
                    for block in blocks:
                        before = (*before, *block.token_ids)
                        assert block.block_hash not in self.prefixes
                        self.prefixes[block.block_hash] = before
                case BlocksRemoved(block_hashes):
                    for block_hash in block_hashes:
                        del self.prefixes[block_hash]


def findable(cache: Cache) -> set[tuple[int, ...]]:
    """The prefixes that the trie knows, by walking it."""
    found = set()
    stack = [(root, ()) for root in cache.kv.state.trie._roots.values()]
    while stack:
        node, before = stack.pop()
        for key, child in node.children.items():
            found.add((*before, *key))
            stack.append((child, (*before, *key)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_replaying_the_events_gives_the_blocks_that_can_be_found(seed: int) -> None:
    dice = random.Random(seed)
    cache, replay = Cache(num_blocks=12, max_events=1000), Replay()
    for seq_id in range(1, 40):
        prompt = [dice.randrange(3) for _ in range(dice.randrange(1, 20))]
        seq = cache.start(make_sequence(seq_id, prompt))
        cache.run(seq)
        cache.kv.release(seq, keep=dice.random() < 0.5)
        replay.read(cache.kv.take_events())
        assert set(replay.prefixes.values()) == findable(cache)
        anew = Replay()
        anew.read([KvEvent(number, data) for number, data in enumerate(cache.kv.cached_prefixes())])
        assert anew.prefixes == replay.prefixes
    assert cache.kv.stats().evicted_blocks_total, "evictions were among it"
    cache.kv.lose_everything()
    replay.read(cache.kv.take_events())
    assert not replay.prefixes


def test_equal_prefixes_have_equal_hashes_and_other_namespaces_have_others() -> None:
    def hashes(namespace: str) -> list[int]:
        cache = Cache(max_events=10)
        cache.run(cache.start(make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], namespace=namespace)))
        created, stored = cache.kv.take_events()
        assert created.data == BlocksCreated(8) and stored.data.parent_hash is None
        return [block.block_hash for block in stored.data.blocks]

    first = block_hash(root_hash("a"), [1, 2, 3, 4])
    assert hashes("a") == hashes("a") == [first, block_hash(first, [5, 6, 7, 8])]
    assert not set(hashes("a")) & set(hashes("b"))


@pytest.mark.parametrize("lora", [None, LoraConfig(7, content="hash of the weights")])
def test_blocks_tell_with_which_adapter_they_were_computed(lora: LoraConfig | None) -> None:
    """Nine tokens are two whole blocks, told while the sequence runs, and a tail, told when it has gone."""
    request = Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, lora=lora)
    cache = Cache(max_events=10, sharing="all")
    seq = cache.start(Sequence(1, 1, request, 1, 0))
    cache.run(seq)
    cache.kv.release(seq, keep=False)
    told = [(event.data.origin.lora_id, block) for event in cache.kv.take_events()[1:] for block in event.data.blocks]
    assert [len(block.token_ids) for _, block in told] == [4, 4, 1]
    assert [lora_id for lora_id, _ in told] == [None if lora is None else 7] * 3


def test_a_log_that_nobody_reads_keeps_the_newest_and_without_a_limit_there_is_none() -> None:
    log = KvEventLog(2, num_blocks=3)
    log.removed([1])
    log.removed([2])
    assert [event.event_id for event in log.take()] == [1, 2]
    assert log.take() == []
    assert Cache().kv.take_events() == []


def test_with_a_block_all_blocks_below_it_are_removed() -> None:
    log = KvEventLog(10, num_blocks=3)
    trie = PrefixTrie(2, EvictedPrefixes(64), log)
    trie.insert("", None, 0, [1, 2, 3, 4, 5, 6], [BlockHandle(BlockId(i), i + 1) for i in range(3)], 3)
    trie.forget(BlockId(0))
    _, stored, removed = log.take()
    assert removed.data == BlocksRemoved([block.block_hash for block in stored.data.blocks])
