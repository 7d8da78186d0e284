"""EvictedPrefixes, and what the books say of conversations without a session that come back after an eviction."""

from __future__ import annotations

import pytest

from backend.api import OutputConfig, PerfMetrics
from backend.kvcache.events import block_hash, root_hash
from backend.kvcache.evicted import BLOCKS_REMEMBERED, EvictedPrefixes
from tests.engine.driver import Driver

CONVERSATION = list(range(1, 31))  # seven whole blocks of four tokens, and two tokens


def hashes_of(token_ids: list[int], size: int) -> list[int]:
    found, parent = [], root_hash("")
    for start in range(0, len(token_ids), size):
        parent = block_hash(parent, token_ids[start : start + size])
        found.append(parent)
    return found


def test_only_whole_blocks_that_follow_without_a_gap_are_counted() -> None:
    evicted, ids = EvictedPrefixes(10), list(range(12))
    first, second, third = hashes_of(ids, 4)
    evicted.add([first, second, third])
    assert evicted.num_blocks_after(root_hash(""), ids, 0, 12, 4) == 3
    assert evicted.num_blocks_after(root_hash(""), ids, 0, 11, 4) == 2
    assert evicted.num_blocks_after(first, ids, 4, 12, 4) == 2
    assert evicted.num_blocks_after(root_hash("another namespace"), ids, 0, 12, 4) == 0
    evicted.discard(second)
    assert evicted.num_blocks_after(root_hash(""), ids, 0, 12, 4) == 1


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    evicted = EvictedPrefixes(2)
    hashes = hashes_of(list(range(100)), 4)
    evicted.add(hashes)
    assert len(evicted) == 2 * BLOCKS_REMEMBERED == 16 < len(hashes)
    evicted.add([hashes[9]])  # the oldest that is left, evicted again
    evicted.add([1])
    assert evicted.num_blocks_after(hashes[8], list(range(36, 44)), 0, 8, 4) == 1  # block 10 has gone


def ask(driver: Driver, prompt: list[int], namespace: str = "") -> PerfMetrics:
    output = OutputConfig(return_perf_metrics=True)
    request = driver.ask(prompt, 1, streaming=False, output_config=output, cache_salt=namespace)
    driver.run()
    return driver.responses[request][-1].result.perf_metrics


@pytest.mark.parametrize("namespace, num_told", [("alice", 28), ("", 0)])
def test_a_conversation_without_a_session_counts_as_evicted_when_it_returns(namespace: str, num_told: int) -> None:
    """The operator is told in any case, the client only where it may know what others have sent."""
    driver = Driver(pool_tokens=64)
    counters = driver.core.counters
    ask(driver, CONVERSATION, namespace)
    assert ask(driver, [*CONVERSATION, 31], namespace).num_recomputed_tokens == 0
    assert counters.recomputed_tokens_total == counters.sequences_evicted_total == 0
    for other in range(3):  # they need the whole pool
        ask(driver, [100 * other + 100 + n for n in range(40)], "others")
    assert counters.recomputed_tokens_total == counters.sequences_evicted_total == 0
    told = ask(driver, [*CONVERSATION, 31, 32, 33], namespace)
    assert (told.num_recomputed_tokens, told.num_evictions) == (num_told, int(num_told > 0))
    assert (counters.recomputed_tokens_total, counters.sequences_evicted_total) == (28, 1)
    ask(driver, [*CONVERSATION, 31, 32, 33, 34], namespace)
    assert counters.sequences_evicted_total == 1, "its KV is there again"


def test_a_prompt_of_another_namespace_was_never_there() -> None:
    driver = Driver(pool_tokens=64)
    ask(driver, CONVERSATION, "alice")
    for other in range(3):
        ask(driver, [100 * other + 100 + n for n in range(40)], "others")
    ask(driver, CONVERSATION, "bob")
    assert driver.core.counters.recomputed_tokens_total == driver.core.counters.sequences_evicted_total == 0


def test_only_the_part_that_was_evicted_is_counted() -> None:
    driver = Driver(pool_tokens=64)
    ask(driver, CONVERSATION, "alice")
    ask(driver, [n + 500 for n in range(40)], "others")  # some of the conversation's blocks are left
    told = ask(driver, CONVERSATION, "alice")
    assert told.num_cached_tokens > 0 and told.num_recomputed_tokens > 0
    assert told.num_cached_tokens + told.num_recomputed_tokens == 28
