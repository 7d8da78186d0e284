"""A random engine: pools so small that everything interesting happens at once. One seed decides all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import msgspec

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, LimitsConfig, SchedulerConfig, SessionsConfig, TritonConfig
from backend.engine.sessions import BYTES_PER_SESSION

VOCAB = 997
MAX_SEQ_LEN = 48


@dataclass(frozen=True)
class Setup:
    config: EngineConfig
    num_blocks: int
    window: int | None
    looks_ahead: bool = False
    has_beams: bool = False
    is_recurrent: bool = False  # the model has a state for each sequence, which cannot go back
    twins: bool = False  # sessions that begin alike and rewind a little under a window, so that tables share blocks

    @property
    def sink_tokens(self) -> int:
        return self.config.kv_cache.sink_tokens


def random_setup(rng: Random, more: Random, sinks: Random) -> Setup:
    """`more` decides whether there are beams, which need more room, `sinks` whether there are sink tokens.

    Without them a setup is the same as if there were none.
    """
    setup = _plain_setup(rng)
    if not setup.twins and more.random() >= 0.75:
        setup = _widened(setup, more)
    return _with_sinks(setup, sinks.randint(1, 6)) if setup.window and sinks.random() < 0.5 else setup


def _with_sinks(setup: Setup, sink_tokens: int) -> Setup:
    kv_cache = msgspec.structs.replace(setup.config.kv_cache, sink_tokens=sink_tokens)
    return replace(setup, config=msgspec.structs.replace(setup.config, kv_cache=kv_cache))


def tuned(setup: Setup, rng: Random) -> Setup:
    """Some of the setups, with limits of the batch that follow the lengths of the latest requests."""
    if rng.random() < 0.85:
        return setup
    scheduler = msgspec.structs.replace(
        setup.config.scheduler,
        enable_batch_size_tuning=rng.random() < 0.6,
        enable_max_num_tokens_tuning=setup.config.scheduler.enable_chunked_context,
        tuning_requests=rng.randint(1, 4),
    )
    return replace(setup, config=msgspec.structs.replace(setup.config, scheduler=scheduler))


def _widened(setup: Setup, more: Random) -> Setup:
    scheduler, kv_cache = setup.config.scheduler, setup.config.kv_cache
    num_rows, times = max(scheduler.max_batch_size, more.choice((4, 6, 9, 9))), more.choice((1, 2, 2, 3))
    num_tokens = max(scheduler.max_num_tokens, num_rows)
    config = msgspec.structs.replace(
        setup.config,
        scheduler=msgspec.structs.replace(scheduler, max_batch_size=num_rows, max_num_tokens=num_tokens),
        kv_cache=msgspec.structs.replace(kv_cache, max_tokens=times * setup.num_blocks * kv_cache.block_size),
    )
    return replace(setup, config=config, num_blocks=times * setup.num_blocks, has_beams=True)


def _plain_setup(rng: Random) -> Setup:
    twins = rng.random() < 0.1
    block_size = 4 if twins else rng.choice((1, 2, 2, 2, 4, 4))
    num_blocks = rng.randint(8, 20) if twins else rng.randint(4, 12)
    window = rng.randint(3, 5) if twins else rng.choice((None, rng.randint(2, 6)))
    kv_cache = KvCacheConfig(
        block_size=block_size,
        max_tokens=block_size * num_blocks,
        chunk_blocks=rng.choice((-1, 0, 1, 3)),
        watermark=rng.choice((0.0, 0.0, 0.1, 0.25)),
        enable_block_reuse=twins or rng.random() < 0.8,
        enable_partial_reuse=rng.random() < 0.7,
        sharing=rng.choice(("all", "all", "namespace", "none")),
    )
    config = EngineConfig(
        kv_cache=kv_cache,
        scheduler=_random_scheduler(rng),
        limits=LimitsConfig(max_queue_size=rng.choice((3, 64, 64)), default_timeout_s=1000.0),
        sessions=SessionsConfig(
            max_sessions=100 if twins else rng.choice((2, 3, 100)),
            max_bytes=rng.choice((1 << 28, 1 << 28, 3 * BYTES_PER_SESSION)),
            idle_ttl_s=rng.choice((20.0, 1000.0)),
        ),
        triton=TritonConfig(stream_interval_ms=40.0 * (num_blocks % 3 == 0)),
    )
    return Setup(config, num_blocks, window, looks_ahead=rng.random() < 0.5, twins=twins)


def _random_scheduler(rng: Random) -> SchedulerConfig:
    max_batch_size = rng.choice((1, 2, 3, 4, 5, 5))
    max_num_tokens = rng.randint(max_batch_size, 12)
    return SchedulerConfig(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        policy=rng.choice(("guaranteed_no_evict", "max_utilization", "max_utilization")),
        batching=rng.choice(("fused", "fused", "separate")),
        enable_chunked_context=rng.random() < 0.7,
        max_chunk_tokens=rng.choice((None, None, rng.randint(1, max_num_tokens))),
        chunking_policy=rng.choice(("first_come_first_served", "equal_progress")),
        max_context_tokens=rng.choice((None, rng.randint(1, max_num_tokens))),
        mixed_context_tokens=rng.choice((None, 1, rng.randint(1, max_num_tokens))),
    )


def recurrent(setup: Setup, rng: Random) -> Setup:
    """Some of the setups without windows, with a recurrent model and few snapshots of its states, or none."""
    if setup.window is not None or rng.random() < 0.5:
        return setup
    size = setup.config.kv_cache.block_size
    snapshots = dict(snapshots=rng.choice((0, 1, 2, 4, 30)), snapshot_interval=size * rng.randint(0, 3))
    kv_cache = msgspec.structs.replace(setup.config.kv_cache, swap_bytes=0, **snapshots)
    scheduler = msgspec.structs.replace(setup.config.scheduler, preemption="recompute")
    config = msgspec.structs.replace(setup.config, scheduler=scheduler, kv_cache=kv_cache)
    return replace(setup, config=config, is_recurrent=True)


def swapping(setup: Setup, rng: Random) -> Setup:
    """Some of the setups that pause sequences, with their KV moved to host memory, which has room for all of it."""
    if setup.config.scheduler.policy != "max_utilization" or rng.random() < 0.6:
        return setup
    scheduler = msgspec.structs.replace(setup.config.scheduler, preemption="swap")
    kv_cache = msgspec.structs.replace(setup.config.kv_cache, swap_bytes=1 << 24)
    return replace(setup, config=msgspec.structs.replace(setup.config, scheduler=scheduler, kv_cache=kv_cache))
