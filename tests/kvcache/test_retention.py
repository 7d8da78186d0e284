"""Priorities in the order of eviction: what a request asks to be kept outlives the rest."""

from __future__ import annotations

import pytest

from backend.api import Request, SamplingConfig
from backend.api.request import DEFAULT_RETENTION_PRIORITY, RetentionConfig, TokenRangeRetention
from backend.api.stats import BlockUpdated
from backend.core.sequence import Event, Sequence
from tests.kvcache.harness import Cache

pytestmark = pytest.mark.feature("002-47")
SECOND = 1_000_000_000


def sequence(seq_id: int, first: int, num_tokens: int, retention: RetentionConfig | None = None) -> Sequence:
    """Its prompt is like no other's."""
    prompt = [first + i for i in range(num_tokens)]
    return Sequence(
        seq_id, seq_id, Request(prompt, 16, sampling_config=SamplingConfig(seed=0), retention=retention), seq_id, 0
    )


def used(cache: Cache, seq: Sequence) -> Sequence:
    """Run it once and let it go; its KV stays cached."""
    cache.run(cache.start(seq))
    cache.kv.release(seq, keep=True)
    return seq


def lost(cache: Cache, seq: Sequence) -> int:
    return cache.kv.num_evicted_blocks(seq)


def kept(priority: int, duration_s: float | None = None) -> RetentionConfig:
    return RetentionConfig((TokenRangeRetention(0, None, priority, duration_s),), decode_priority=priority)


def test_a_prefix_of_high_priority_survives_pressure_that_evicts_what_was_used_later() -> None:
    cache = Cache(num_blocks=6)
    old = used(cache, sequence(1, 100, 7, kept(90)))
    low, newest = used(cache, sequence(2, 200, 7)), used(cache, sequence(3, 300, 7))
    used(cache, sequence(4, 400, 7))
    used(cache, sequence(5, 500, 7))
    assert (lost(cache, old), lost(cache, low), lost(cache, newest)) == (0, 2, 2)


def test_a_low_priority_goes_before_what_was_used_earlier() -> None:
    cache = Cache(num_blocks=6)
    old = used(cache, sequence(1, 100, 7))
    low = used(cache, sequence(2, 200, 7, kept(0)))
    used(cache, sequence(3, 300, 7))
    used(cache, sequence(4, 400, 7))
    assert (lost(cache, old), lost(cache, low)) == (0, 2)


def test_when_all_is_of_high_priority_it_is_evicted_nevertheless() -> None:
    cache = Cache(num_blocks=4)
    old = used(cache, sequence(1, 100, 7, kept(100)))
    used(cache, sequence(2, 200, 7, kept(100)))
    used(cache, sequence(3, 300, 7))
    assert lost(cache, old) == 2


def test_a_priority_lapses_after_its_duration_and_the_block_counts_as_used_then() -> None:
    def losses(seconds: int) -> tuple[int, int]:
        cache = Cache(num_blocks=6)
        cache.kv.tick(10 * SECOND)
        kept_for_a_while = used(cache, sequence(1, 100, 7, kept(90, 5.0)))
        other = used(cache, sequence(2, 200, 7))
        cache.kv.tick((10 + seconds) * SECOND)
        third = used(cache, sequence(3, 300, 7))
        used(cache, sequence(4, 400, 7))
        used(cache, sequence(5, 500, 7))
        assert lost(cache, other) == 2
        return lost(cache, kept_for_a_while), lost(cache, third)

    assert losses(4) == (0, 2)
    assert losses(5) == (2, 0)


def test_the_use_that_came_last_decides_and_its_predecessors_end_is_void() -> None:
    cache = Cache(num_blocks=6)
    seq = used(cache, sequence(1, 100, 7, kept(90, 5.0)))
    seq.apply(Event.PAUSE)
    seq.request = Request([], 16, retention=kept(90))
    cache.run(cache.start(seq))
    cache.kv.release(seq, keep=True)
    cache.kv.tick(100 * SECOND)
    for number in range(2, 6):
        used(cache, sequence(number, number * 100, 7))
    assert lost(cache, seq) == 0


def test_what_is_ahead_of_a_kept_block_is_kept_as_long() -> None:
    cache = Cache(num_blocks=6)
    only_its_end = RetentionConfig((TokenRangeRetention(4, None, 90, 5.0),))
    seq = used(cache, sequence(1, 100, 7, only_its_end))
    for number in range(2, 6):
        used(cache, sequence(number, number * 100, 7))
    assert lost(cache, seq) == 0


@pytest.mark.feature("000-61")
def test_a_new_priority_and_its_end_are_told_as_events() -> None:
    cache = Cache(num_blocks=6, max_events=100)
    used(cache, sequence(1, 100, 5, RetentionConfig((TokenRangeRetention(0, None, 90, 5.0),))))
    cache.kv.tick(5 * SECOND)
    _, stored, *updates = (event.data for event in cache.kv.take_events())
    (block,) = stored.blocks
    assert updates == [BlockUpdated(block.block_hash, 90), BlockUpdated(block.block_hash, DEFAULT_RETENTION_PRIORITY)]


def test_a_range_covers_the_blocks_that_begin_in_it_and_output_has_its_own_priority() -> None:
    retention = RetentionConfig((TokenRangeRetention(0, 17, 80, 3.0), TokenRangeRetention(40, None, 20)), 60, 9.0)
    blocks = [retention.of_token(first, 56) for first in range(0, 80, 16)]
    assert blocks == [(80, 3.0), (80, 3.0), (35, None), (20, None), (60, 9.0)]
